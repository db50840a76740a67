"""`ci`: whatever training left, validated, consolidated, merged, verified and pushed, stage by stage."""
