"""Studies on top of predictions: the first step of training, the rates it allows, orders of growth and fixed points."""
