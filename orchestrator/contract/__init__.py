"""What crosses the border between the control plane and the trial plane."""
