"""A mixture of experts: a router chooses some feed-forwards for every token."""
