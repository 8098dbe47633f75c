"""Plans of the registry for one layer, how long they are remembered, and quantizers that round to MXFP4 first."""
