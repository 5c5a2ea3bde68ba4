"""Plain torch on any device: the oracle for every other backend."""
