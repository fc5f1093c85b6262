"""Memory below the device: host memory and disk, under hard caps."""
