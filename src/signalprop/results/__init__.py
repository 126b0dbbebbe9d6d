"""What is predicted or measured of a network, and how well two of them agree. No PyTorch."""
