"""What the user asks for: sweep specs, model shapes, the device table and cluster profiles."""
