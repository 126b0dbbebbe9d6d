"""How far single networks lie from the mean that is predicted; called once, after a pass."""
