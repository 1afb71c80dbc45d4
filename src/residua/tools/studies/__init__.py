"""Studies of captured calls: each has a `measure` and a `report` module; shared parts are beside them."""
