"""AIMET's config files, read into a QuantConfig."""
