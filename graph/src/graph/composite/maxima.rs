//! Maxima that are subtracted for the range alone.
//!
//! A softmax does not change with what is subtracted from all of its input, so that no gradient goes through
//! the maximum: Burn detaches its operand. An execution that did not would look for the place of each maximum
//! and add zeros, up to rounding, to the gradients there.

use burn::backend::ir::{
    BaseOperationIr, FloatOperationIr, NumericOperationIr as Op, OperationIr, TensorIr,
};

use super::Finder;

impl Finder<'_> {
    /// The position of the maximum that is subtracted in what ends at a position, if it is a softmax, a
    /// logarithm of one, or a quiet softmax.
    pub(super) fn subtracted_maximum(&self, index: usize) -> Option<usize> {
        if let Some(softmax) = self.softmax(index) {
            // The first of its parts, where it has any.
            return softmax.inner.first().copied();
        }
        let OperationIr::NumericFloat(_, operation) = self.own(index)? else {
            return None;
        };
        match operation {
            // exp(x − m) / (Σ exp(x − m) + exp(−m))
            Op::Div(div) => {
                let (exponent, at_exp) = self.exp(&div.lhs, 2)?;
                let (Op::Sub(shift), _) = self.numeric(exponent, 1)? else {
                    return None;
                };
                let (Op::Add(all), _) = self.numeric(&div.rhs, 1)? else {
                    return None;
                };
                let (Op::SumDim(sum), _) = self.numeric(&all.lhs, 1)? else {
                    return None;
                };
                let (Op::Neg(neg), _) = self.numeric(self.exp(&all.rhs, 1)?.0, 1)? else {
                    return None;
                };
                let is_sum = self.made_by.get(&sum.input.id) == Some(&at_exp);
                let fits = is_sum && neg.input.id == shift.rhs.id;
                let most = fits.then(|| self.without_infinity(&shift.rhs))??;
                self.maximum(&shift.lhs, most, sum.axis, 2)
            }
            // (x − m) − log Σ exp(x − m)
            Op::Sub(sub) => {
                let (OperationIr::Float(_, FloatOperationIr::Log(log)), _) =
                    self.maker(&sub.rhs, 1)?
                else {
                    return None;
                };
                let (Op::SumDim(sum), _) = self.numeric(&log.input, 1)? else {
                    return None;
                };
                let (shifted, _) = self.exp(&sum.input, 1)?;
                let (Op::Sub(shift), _) = self.numeric(shifted, 2)? else {
                    return None;
                };
                (shifted.id == sub.lhs.id)
                    .then(|| self.maximum(&shift.lhs, &shift.rhs, sum.axis, 1))?
            }
            _ => None,
        }
    }

    /// The operand of the exponential that a tensor is, and its position.
    pub(super) fn exp(&self, tensor: &TensorIr, readers: usize) -> Option<(&TensorIr, usize)> {
        match self.maker(tensor, readers)? {
            (OperationIr::Float(_, FloatOperationIr::Exp(exp)), at) => Some((&exp.input, at)),
            _ => None,
        }
    }

    /// The maximum of which a tensor is a copy with zeros for infinities.
    fn without_infinity(&self, tensor: &TensorIr) -> Option<&TensorIr> {
        match self.maker(tensor, 2)? {
            (OperationIr::BaseFloat(BaseOperationIr::MaskFill(fill)), _) => {
                let (mask, _) = self.maker(&fill.mask, 1)?;
                let of_it = mask.inputs().all(|read| read.id == fill.tensor.id);
                of_it.then_some(&fill.tensor)
            }
            _ => None,
        }
    }

    /// Where `most` is made, if it is the maximum of `x` along this axis.
    fn maximum(&self, x: &TensorIr, most: &TensorIr, axis: usize, readers: usize) -> Option<usize> {
        match self.numeric(most, readers)? {
            (Op::MaxDim(found), at) => (found.input.id == x.id && found.axis == axis).then_some(at),
            _ => None,
        }
    }
}
