"""Image sets: files to uint8 arrays (a module a format), sets by name (registry), batches on the device (resident)."""
