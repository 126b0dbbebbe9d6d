"""The explorer: a page on this machine whose controls redraw the predicted signal at every change."""
