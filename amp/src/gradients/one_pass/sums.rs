//! Where the kernel writes.

use std::ops::Range;

use burn::backend::Dispatch;
use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};
use burn_lean_reparam::FloatVisitor;

use super::Look;
use super::kernel::{OnePass, is_there_for, parts};
use crate::gradients::walk::visit_once;

/// What is found in tensors on one device, one after the other: [`parts`] numbers of each.
#[derive(Debug)]
pub(in crate::gradients) struct Sums {
    look: Look,
    /// `[1]` where nobody looks for them.
    exponents: Tensor<1>,
    squares: Tensor<1>,
    /// How many numbers are written.
    written: usize,
}

impl Sums {
    fn new(look: Look, count: usize, device: &Device) -> Self {
        // The kernels add to what is there: what they write alone would be taken for good where an earlier one of
        // them, of another gradient, has failed.
        let zeros = |is_wanted: bool| {
            let count = if is_wanted { count } else { 1 };
            Tensor::<1>::zeros([count], (device, DType::F32))
        };
        Self {
            look,
            exponents: zeros(look.is_for_finite()),
            squares: zeros(look.is_for_squares()),
            written: 0,
        }
    }

    /// For this tensor alone.
    pub(in crate::gradients) fn of<const D: usize>(x: &Tensor<D>, look: Look) -> Self {
        Self::new(look, parts(x.shape().num_elements()), &x.device())
    }

    /// Powers of two that are finite where `x` is, which has elements.
    pub(super) fn exponents_of<const D: usize>(x: Tensor<D>) -> Tensor<1> {
        let sums = Self::of(&x, Look::Finite);
        let (_, _, sums) = sums.look(x, None);
        sums.exponents
    }

    /// For all gradients of `model`, where the kernel is there for each of them and they are on one device.
    pub(in crate::gradients) fn of_all<M: Module>(
        model: &M,
        grads: &GradientsParams,
        look: Look,
    ) -> Option<Self> {
        let mut count = Count {
            grads,
            parts: 0,
            device: None,
            is_for_all: true,
        };
        visit_once(model, &mut count);
        let device = count.device.filter(|_| count.is_for_all)?;
        Some(Self::new(look, count.parts, &device))
    }

    /// `x · factor`, or `x` without one, and where the numbers for it are. `factor` is `[1]`, F32; `x` has elements.
    pub(in crate::gradients) fn look<const D: usize>(
        self,
        x: Tensor<D>,
        factor: Option<Tensor<1>>,
    ) -> (Tensor<D>, Range<usize>, Self) {
        let (look, first) = (self.look, self.written);
        let written = first + parts(x.shape().num_elements());
        let exponents = self.exponents.into_dispatch();
        let squares = self.squares.into_dispatch();
        let (x, exponents, squares) = match factor {
            Some(factor) => {
                let (x, factor) = (x.into_dispatch(), factor.into_dispatch());
                let (x, exponents, squares) =
                    Dispatch::multiply_and_look(x, factor, exponents, squares, first, look);
                (Tensor::<D>::from_dispatch(x), exponents, squares)
            }
            None => {
                let seen = x.clone().into_dispatch();
                let (exponents, squares) = Dispatch::look(seen, exponents, squares, first, look);
                (x, exponents, squares)
            }
        };
        let sums = Self {
            look,
            exponents: Tensor::from_dispatch(exponents),
            squares: Tensor::from_dispatch(squares),
            written,
        };
        (x, first..written, sums)
    }

    /// Numbers that are finite where the tensors are, and parts of sums of squares, of those that were looked for.
    pub(in crate::gradients) fn found(self) -> (Option<Tensor<1>>, Option<Tensor<1>>) {
        let Self {
            look,
            exponents,
            squares,
            ..
        } = self;
        (
            look.is_for_finite().then_some(exponents),
            look.is_for_squares().then_some(squares),
        )
    }
}

/// Counts the parts of all gradients that have elements.
struct Count<'a> {
    grads: &'a GradientsParams,
    parts: usize,
    device: Option<Device>,
    is_for_all: bool,
}

impl FloatVisitor for Count<'_> {
    fn visit<const D: usize>(&mut self, _path: &str, param: &Param<Tensor<D>>) {
        if !self.is_for_all {
            return;
        }
        let Some(grad) = self.grads.get::<D>(param.id) else {
            return;
        };
        let elements = grad.shape().num_elements();
        if elements == 0 {
            return;
        }
        let device = grad.device().without_autodiff();
        let is_elsewhere = self.device.as_ref().is_some_and(|known| *known != device);
        self.is_for_all = is_there_for(&grad) && !is_elsewhere;
        self.parts += parts(elements);
        self.device = Some(device);
    }
}
