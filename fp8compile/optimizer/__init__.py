"""8-bit optimizer states: how they are stored, how an optimizer gets them, and its checkpoints."""
