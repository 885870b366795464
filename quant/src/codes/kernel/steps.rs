//! Linear layers in the steps of a recurrence: what is the same in all of them is looked up once, and what
//! several layers multiply is read and rounded once.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use burn::nn::Linear;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_lean_kernels::{CodeGrid, Epilogue};

use super::linear::tried;
use super::matrix::{Matrix, Packed};
use super::{Tried, UNIT, acting, codes, grids};
use crate::{FakeQuantize, Granularity, Scheme, WeightQuantizer};

/// One for all rows, or one for each.
type Grids = Rc<[CodeGrid]>;

/// Rows `[.., features]` that several layers multiply.
pub(crate) struct Shared<const D: usize> {
    tensor: Tensor<D>,
    data: OnceCell<Option<TensorData>>,
    /// Of the latest layer that rounds to the range of these very numbers: its scheme, and the grids.
    grids: RefCell<Option<(Scheme, Grids)>>,
    /// As the latest layer rounded them.
    rounded: RefCell<Option<Rounded>>,
}

struct Rounded {
    grids: Grids,
    codes: Rc<Vec<i16>>,
}

impl<const D: usize> Shared<D> {
    pub(crate) fn new(tensor: Tensor<D>) -> Self {
        Self {
            tensor,
            data: OnceCell::new(),
            grids: RefCell::default(),
            rounded: RefCell::default(),
        }
    }

    fn numbers(&self) -> Option<&[f32]> {
        let read = || self.tensor.clone().try_into_data().ok();
        self.data.get_or_init(read).as_ref()?.as_slice().ok()
    }

    /// `None` where a number is not finite.
    fn codes(&self, grids: &Grids) -> Option<Rc<Vec<i16>>> {
        if let Some(known) = &*self.rounded.borrow()
            && known.grids == *grids
        {
            return Some(known.codes.clone());
        }
        let codes = codes(self.numbers()?, self.tensor.dims()[D - 1], grids)?;
        let codes = Rc::new(codes);
        *self.rounded.borrow_mut() = Some(Rounded {
            grids: grids.clone(),
            codes: codes.clone(),
        });
        Some(codes)
    }

    /// What another layer of this scheme has found.
    fn known_grids(&self, scheme: &Scheme) -> Option<Grids> {
        let known = self.grids.borrow();
        let (_, grids) = known.as_ref().filter(|(of, _)| of == scheme)?;
        Some(grids.clone())
    }

    fn keep_grids(&self, scheme: &Scheme, grids: &Grids) {
        *self.grids.borrow_mut() = Some((scheme.clone(), grids.clone()));
    }
}

/// A layer whose weight was converted so that a kernel multiplies by its codes, in one forward pass.
pub(crate) struct Steps<'a> {
    quantizers: &'a WeightQuantizer,
    device: Device,
    tried: Arc<Tried<Packed>>,
    epilogue: RefCell<Epilogue>,
    /// The grid of an input whose range stays.
    kept: RefCell<Option<Grids>>,
    /// Whether an input was rounded to the range of its own numbers: then the next one is, too.
    rounds: Cell<bool>,
}

impl<'a> Steps<'a> {
    /// In a pass over this sequence; `None` where Burn is to compute the layer from values.
    pub(crate) fn new(layer: &'a Linear, sequence: &Shared<3>) -> Option<Self> {
        let quantizers = acting(&layer.weight, &sequence.tensor)?;
        let tried = tried(layer, quantizers);
        let packed = tried.packed.as_ref()?;
        let make = |bias: Option<&[f32]>| vec![packed.epilogue(bias)];
        let copy = |ends: &mut [Epilogue]| ends[0].clone();
        let epilogue = tried.ends.with(layer.bias.as_ref(), make, copy)?;
        Some(Self {
            quantizers,
            device: sequence.tensor.device(),
            tried,
            epilogue: RefCell::new(epilogue),
            kept: RefCell::default(),
            rounds: Cell::new(false),
        })
    }

    /// `[rows, outputs]`, before the output is quantized; `None` where Burn is to compute them from values.
    pub(crate) fn product<const D: usize>(&self, x: &Shared<D>) -> Option<Vec<f32>> {
        let packed = self.packed_for(x)?;
        match (&packed.matrix, &self.quantizers.input) {
            (Matrix::Floats(_), None) => packed.of_floats(x.numbers()?, &self.epilogue.borrow()),
            (Matrix::Floats(_), Some(input)) => {
                let data = input.forward(x.tensor.clone()).try_into_data().ok()?;
                packed.of_floats(data.as_slice().ok()?, &self.epilogue.borrow())
            }
            (Matrix::Integers(_), Some(input)) => {
                self.product_of_codes(packed, input, x, &self.grids(input, x)?)
            }
            (Matrix::Integers(_), None) => None,
        }
    }

    /// The same of rows of zeros, which are not rounded.
    pub(crate) fn product_of_zeros(&self, x: &Shared<2>) -> Option<Vec<f32>> {
        let packed = self.packed_for(x)?;
        let numbers = x.numbers()?;
        match &packed.matrix {
            Matrix::Floats(_) => packed.of_floats(numbers, &self.epilogue.borrow()),
            // What is no zero is NaN, and has no code.
            Matrix::Integers(_) => {
                packed.of_integers(numbers, &[UNIT], &mut self.epilogue.borrow_mut())
            }
        }
    }

    /// Of all steps of a sequence `[batch, steps, inputs]`, before the output is quantized; `None` where Burn is to
    /// compute them from values, and where floats are multiplied that each step has rounded by itself.
    pub(crate) fn products(&self, x: &Shared<3>) -> Option<Products> {
        let packed = self.packed_for(x)?;
        let input = self.quantizers.input.as_ref();
        let numbers = match (
            input.filter(|input| input.is_enabled() && input.takes_steps()),
            &packed.matrix,
        ) {
            (None, _) => self.product(x),
            (Some(_), Matrix::Floats(_)) => None,
            (Some(input), Matrix::Integers(_)) => {
                self.product_of_codes(packed, input, x, &self.grids_of_steps(input, x)?)
            }
        };
        let [batch, steps, _] = x.tensor.dims();
        Some(Products {
            numbers: numbers?,
            dims: [batch, steps, packed.shape[1]],
            device: self.device.clone(),
        })
    }

    /// What [`product`](Self::product) gave.
    pub(crate) fn tensor(&self, product: Vec<f32>) -> Tensor<2> {
        let outputs = self.outputs();
        tensor(product, outputs, &self.device)
    }

    pub(crate) fn outputs(&self) -> usize {
        self.tried
            .packed
            .as_ref()
            .map_or(0, |packed| packed.shape[1])
    }

    /// What multiplies such rows: Burn would refuse nothing.
    fn packed_for<const D: usize>(&self, x: &Shared<D>) -> Option<&Packed> {
        let packed = self.tried.packed.as_ref()?;
        let x = &x.tensor;
        let dims = x.dims();
        let is_like = x.dtype() == DType::F32 && !x.is_autodiff() && x.device() == self.device;
        let fits = dims[D - 1] == packed.shape[0] && !dims.contains(&0);
        (is_like && fits).then_some(packed)
    }

    fn product_of_codes<const D: usize>(
        &self,
        packed: &Packed,
        input: &FakeQuantize,
        x: &Shared<D>,
        grids: &Grids,
    ) -> Option<Vec<f32>> {
        let codes = x.codes(grids)?;
        let y = packed.of_codes(&codes, grids, &mut self.epilogue.borrow_mut())?;
        input.called();
        Some(y)
    }

    /// What an input is rounded to.
    fn grids<const D: usize>(&self, input: &FakeQuantize, x: &Shared<D>) -> Option<Grids> {
        if let Some(kept) = &*self.kept.borrow() {
            return Some(kept.clone());
        }
        let scheme = input.scheme();
        let is_of_numbers = !(input.keeps_range() || input.has_range());
        if is_of_numbers
            && self.rounds.get()
            && let Some(known) = x.known_grids(scheme)
        {
            return Some(known);
        }
        let found = grids(&input.rounds_with(&x.tensor)?, scheme, &x.tensor.dims())?;
        let found: Grids = found.into();
        if is_of_numbers {
            self.rounds.set(true);
            x.keep_grids(scheme, &found);
        } else if scheme.granularity == Granularity::PerTensor {
            *self.kept.borrow_mut() = Some(found.clone());
        }
        Some(found)
    }

    /// What each row of a sequence is rounded to, where each step has a range of its own.
    fn grids_of_steps(&self, input: &FakeQuantize, x: &Shared<3>) -> Option<Grids> {
        let of_step = |step: usize| {
            let x: Tensor<2> = x.tensor.clone().narrow(1, step, 1).squeeze_dim(1);
            let grids = self.grids(input, &Shared::new(x))?;
            match *grids {
                [grid] => Some(grid),
                _ => None,
            }
        };
        // Tells whether it rounds.
        let first = of_step(0)?;
        let scheme = input.scheme();
        if self.rounds.get()
            && let Some(known) = x.known_grids(scheme)
        {
            return Some(known);
        }
        let [batch, steps, _] = x.tensor.dims();
        let rest = (1..steps).map(of_step);
        let of_steps: Option<Vec<CodeGrid>> = std::iter::once(Some(first)).chain(rest).collect();
        let found: Grids = of_steps?.repeat(batch).into();
        if self.rounds.get() {
            x.keep_grids(scheme, &found);
        }
        Some(found)
    }
}

fn tensor(numbers: Vec<f32>, columns: usize, device: &Device) -> Tensor<2> {
    let rows = numbers.len() / columns.max(1);
    Tensor::from_data(
        TensorData::new(numbers, [rows, columns]),
        (device, DType::F32),
    )
}

/// Products of all steps of a sequence.
pub(crate) struct Products {
    numbers: Vec<f32>,
    /// `[batch, steps, outputs]`
    dims: [usize; 3],
    device: Device,
}

impl Products {
    /// Those of a step: `[batch, outputs]`.
    pub(crate) fn shape(&self) -> [usize; 2] {
        let [batch, _, outputs] = self.dims;
        [batch, outputs]
    }

    fn rows(&self, step: usize) -> impl Iterator<Item = &[f32]> {
        let [_, steps, outputs] = self.dims;
        let rows = self.numbers.chunks_exact(outputs);
        rows.skip(step).step_by(steps)
    }

    pub(crate) fn of_step(&self, step: usize) -> Tensor<2> {
        let rows: Vec<&[f32]> = self.rows(step).collect();
        tensor(rows.concat(), self.dims[2], &self.device)
    }

    /// Adds those of a step to numbers of their shape.
    pub(crate) fn add_to(&self, step: usize, sums: &mut [f32]) {
        for (sums, products) in sums.chunks_exact_mut(self.dims[2]).zip(self.rows(step)) {
            for (sum, product) in sums.iter_mut().zip(products) {
                *sum += product;
            }
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::range::observer::read;

    #[test]
    fn rows_are_rounded_once_for_layers_that_round_alike() {
        let x = Tensor::<2>::from_floats([[0.5, -1.0], [0.2, 3.0]], &Device::flex());
        let shared = Shared::new(x);
        let grids = |scales: &[f32]| -> Grids {
            let grid = |scale: &f32| CodeGrid {
                scale: *scale,
                low: -8,
                high: 7,
            };
            scales.iter().map(grid).collect()
        };
        let first = shared.codes(&grids(&[0.5])).unwrap();
        assert_eq!(*first, [1, -2, 0, 6]);
        assert!(Rc::ptr_eq(&first, &shared.codes(&grids(&[0.5])).unwrap()));
        let of_rows = shared.codes(&grids(&[0.25, 1.0])).unwrap();
        assert_eq!(*of_rows, [2, -4, 0, 3]);
        let nan = Shared::new(Tensor::<1>::from_floats([f32::NAN], &Device::flex()));
        assert!(nan.codes(&grids(&[0.5])).is_none());
    }

    #[test]
    fn products_of_a_step_are_those_of_each_example() {
        let products = Products {
            numbers: (0..12u8).map(f32::from).collect(),
            dims: [2, 3, 2],
            device: Device::flex(),
        };
        assert_eq!(products.shape(), [2, 2]);
        let of_step = read(products.of_step(1)).unwrap();
        assert_eq!(of_step, [2.0, 3.0, 8.0, 9.0]);
        let mut sums = [0.5; 4];
        products.add_to(2, &mut sums);
        assert_eq!(sums, [4.5, 5.5, 10.5, 11.5]);
    }
}
