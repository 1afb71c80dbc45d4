"""How the model of `residua.world` is trained. Not part of the installed package."""
