"""The verbs that show and decide: which layer hurts, where two models differ, what to do next."""
