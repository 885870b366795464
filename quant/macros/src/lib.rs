//! The attribute macro of burn-lean-quant.
