//! The few shapes that operations have: which fields are fetched, what is called, where it goes.

use burn::backend::ir::TensorIr;
use burn::backend::{Dispatch, DispatchTensor, get_device_settings};
use burn::tensor::BoolDType;

use super::Operands;

/// What several families ask of operands.
pub(super) trait Fetch: Operands {
    /// A float operand that may be absent.
    fn optional(&mut self, tensor: &Option<TensorIr>) -> Option<DispatchTensor> {
        tensor.as_ref().map(|tensor| self.float(tensor))
    }

    /// How the device of the execution stores bools.
    fn bool_dtype(&self) -> BoolDType {
        get_device_settings::<Dispatch>(&self.device()).bool_dtype
    }
}

impl<O: Operands> Fetch for O {}

/// `o.out = compute(fields of o)`; each field with the kind of tensor it is.
macro_rules! apply {
    ($operands:ident, $o:ident, $compute:expr, $($kind:ident $field:ident),+) => {{
        let compute = $compute;
        let value = compute($($operands.$kind(&$o.$field)),+);
        $operands.set(&$o.out, value);
    }};
}

/// The same, for a computation of values and their indices.
macro_rules! apply_with_indices {
    ($operands:ident, $o:ident, $compute:expr, $($kind:ident $field:ident),+) => {{
        let compute = $compute;
        let (values, indices) = compute($($operands.$kind(&$o.$field)),+);
        $operands.set(&$o.out, values);
        $operands.set(&$o.out_indices, indices);
    }};
}

/// Of a shape and a dtype alone.
macro_rules! made {
    ($operands:ident, $o:ident, $compute:expr, $dtype:expr) => {{
        let (device, dtype) = ($operands.device(), $dtype);
        let compute = $compute;
        $operands.set(&$o.out, compute($o.out.shape.clone(), &device, dtype));
    }};
}

/// Of one tensor.
macro_rules! unary {
    ($operands:ident, $o:ident, $kind:ident, $compute:expr) => {
        apply!($operands, $o, $compute, $kind input)
    };
}

/// Of one tensor, along a dimension.
macro_rules! along {
    ($operands:ident, $o:ident, $kind:ident, $compute:expr) => {
        apply!($operands, $o, |x| $compute(x, $o.axis), $kind input)
    };
}

/// Of two tensors.
macro_rules! binary {
    ($operands:ident, $o:ident, $kind:ident, $compute:expr) => {
        apply!($operands, $o, $compute, $kind lhs, $kind rhs)
    };
}

/// Of a tensor and a number.
macro_rules! scalar {
    ($operands:ident, $o:ident, $kind:ident, $compute:expr) => {
        apply!($operands, $o, |x| $compute(x, $o.rhs.into()), $kind lhs)
    };
}

/// Bools from two tensors.
macro_rules! compare {
    ($operands:ident, $o:ident, $kind:ident, $compute:expr) => {{
        let dtype = $operands.bool_dtype();
        apply!($operands, $o, |x, y| $compute(x, y, dtype), $kind lhs, $kind rhs)
    }};
}

/// Bools from a tensor and a number.
macro_rules! compare_scalar {
    ($operands:ident, $o:ident, $kind:ident, $compute:expr) => {{
        let dtype = $operands.bool_dtype();
        apply!($operands, $o, |x| $compute(x, $o.rhs.into(), dtype), $kind lhs)
    }};
}

/// Bools from one tensor.
macro_rules! test {
    ($operands:ident, $o:ident, $kind:ident, $compute:expr) => {{
        let dtype = $operands.bool_dtype();
        apply!($operands, $o, |x| $compute(x, dtype), $kind input)
    }};
}

/// Bools from one tensor, along a dimension.
macro_rules! test_along {
    ($operands:ident, $o:ident, $kind:ident, $compute:expr) => {{
        let dtype = $operands.bool_dtype();
        apply!($operands, $o, |x| $compute(x, $o.axis, dtype), $kind input)
    }};
}
