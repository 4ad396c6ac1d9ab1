"""Models as their libraries ship them, trained by BF16 torch.compile and by this compiler."""
