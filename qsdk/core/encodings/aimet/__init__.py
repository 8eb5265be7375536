"""AIMET's encodings files, versions 0.6.1 to 2.1.0."""
