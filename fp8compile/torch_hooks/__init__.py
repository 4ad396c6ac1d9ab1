"""Where torch calls the compiler, and where its behaviour is changed for this backend."""
