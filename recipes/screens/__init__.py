"""What commands show on a terminal: the list of recipes, and the plan of one on a screen or whole."""
