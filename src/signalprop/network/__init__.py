"""What a network is: its architecture, the table of its numbers, what it reads and what it costs. No PyTorch."""
