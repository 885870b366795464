//! What is seen in gradients, one after the other.

use std::ops::Range;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};

use super::one_pass::{Look, finite, squares};
#[cfg(feature = "cube")]
use super::one_pass::{Sums, is_there_for};
use super::unscale::Inverse;

/// Numbers on the device about gradients, in as few tensors as they came in.
#[derive(Debug, Default)]
pub(crate) struct Numbers {
    pub(crate) tensors: Vec<Tensor<1>>,
    /// For each gradient where its numbers are; nowhere for an empty one.
    pub(crate) places: Vec<Vec<Place>>,
}

/// Which tensor of several, and where in it.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) tensor: usize,
    pub(crate) range: Range<usize>,
}

/// Looks at gradients, and remembers what it saw.
#[derive(Debug)]
pub(super) struct Seen {
    look: Look,
    /// One for all gradients: one tensor to read, and one to sum up.
    #[cfg(feature = "cube")]
    shared: Option<Sums>,
    finite: Vec<Tensor<1>>,
    squares: Vec<Tensor<1>>,
    places: Vec<Vec<Place>>,
}

impl Seen {
    /// For all of `grads` that `model` has a parameter of, each to be looked at once.
    pub(super) fn new<M: Module>(model: &M, grads: &GradientsParams, look: Look) -> Self {
        #[cfg(not(feature = "cube"))]
        let _ = (model, grads);
        Self {
            look,
            #[cfg(feature = "cube")]
            shared: Sums::of_all(model, grads, look),
            finite: Vec::new(),
            squares: Vec::new(),
            places: Vec::new(),
        }
    }

    /// Multiplies by the inverse scale, and looks.
    pub(super) fn look<const D: usize>(
        &mut self,
        grad: Tensor<D>,
        inverse: &mut Inverse,
    ) -> Tensor<D> {
        // Arithmetic on nothing panics on some of Burn's backends, and there is nothing to do.
        if grad.shape().num_elements() == 0 {
            self.places.push(Vec::new());
            return grad;
        }
        #[cfg(feature = "cube")]
        if is_there_for(&grad) {
            let factor = inverse.factor(&grad.device());
            return self.in_one_pass(grad, factor);
        }
        let found = self.look.is_for_finite().then(|| finite(grad.clone()));
        let grad = inverse.apply(grad);
        let summed = self.look.is_for_squares().then(|| squares(grad.clone()));
        self.place(0..1);
        self.finite.extend(found);
        self.squares.extend(summed);
        grad
    }

    #[cfg(feature = "cube")]
    fn in_one_pass<const D: usize>(
        &mut self,
        grad: Tensor<D>,
        factor: Option<Tensor<1>>,
    ) -> Tensor<D> {
        let shared = self.shared.take();
        let is_shared = shared.is_some();
        let sums = shared.unwrap_or_else(|| Sums::of(&grad, self.look));
        let (grad, range, sums) = sums.look(grad, factor);
        self.place(range);
        match is_shared {
            true => self.shared = Some(sums),
            false => self.keep(sums),
        }
        grad
    }

    #[cfg(feature = "cube")]
    fn keep(&mut self, sums: Sums) {
        let (found, summed) = sums.found();
        self.finite.extend(found);
        self.squares.extend(summed);
    }

    /// Notes where the numbers of a gradient will be: in the next tensor.
    fn place(&mut self, range: Range<usize>) {
        let tensor = self.finite.len().max(self.squares.len());
        self.places.push(vec![Place { tensor, range }]);
    }

    /// Numbers that are finite where the gradients are, or else the parts of sums of squares, in F32, since they are
    /// read on one device; and these, where they were looked for.
    #[cfg_attr(not(feature = "cube"), allow(unused_mut))]
    pub(super) fn found(mut self) -> (Numbers, Vec<Tensor<1>>) {
        #[cfg(feature = "cube")]
        if let Some(sums) = self.shared.take() {
            self.keep(sums);
        }
        let tensors = match self.look.is_for_finite() {
            true => self.finite,
            false => {
                let squares = self.squares.iter().cloned();
                squares.map(|part| part.cast(DType::F32)).collect()
            }
        };
        let numbers = Numbers {
            tensors,
            places: self.places,
        };
        (numbers, self.squares)
    }
}
