"""Image sets: files to uint8 arrays (sources), sets by name (registry), batches on the device (resident)."""
