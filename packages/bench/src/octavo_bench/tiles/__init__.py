"""`octavo bench tiles`: every tile of octavo-native's GEMMs against the model's choice."""
