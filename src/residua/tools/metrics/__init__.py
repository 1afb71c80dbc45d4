"""How far a video is from another one, or from the physics of its scene; how far an output is from dense attention."""
