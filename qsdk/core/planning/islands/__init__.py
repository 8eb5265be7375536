"""Islands: ops that compute in a narrow float type inside a wider model."""
