//! What follows the sums of a product, kept from call to call.

use std::sync::Mutex;

use burn::module::Param;
use burn::tensor::Tensor;
use burn_lean_kernels::Epilogue;
use burn_lean_reparam::attached;

use crate::module::listen::listener::lock;
use crate::range::observer::read;

/// Epilogues with the bias of a layer. To read it and to copy all of their numbers would take as long as the product of
/// a row with a small weight.
#[derive(Default)]
pub(super) struct Ends(Mutex<Option<Kept>>);

struct Kept {
    /// As long as it is held here, no other parameter is where its value is.
    bias: Option<Param<Tensor<1>>>,
    epilogues: Vec<Epilogue>,
}

impl Kept {
    /// Whether that was the bias: what changes a parameter makes another value of it.
    fn is_of(&self, bias: Option<&Param<Tensor<1>>>) -> bool {
        match (&self.bias, bias) {
            (None, None) => true,
            (Some(kept), Some(bias)) => std::ptr::eq::<Tensor<1>>(&**kept, &**bias),
            _ => false,
        }
    }
}

impl Ends {
    /// What `multiply` gives with the epilogues that `make` makes of the numbers of this bias, or made of them before.
    /// `None` where they cannot be read.
    pub(super) fn with<R>(
        &self,
        bias: Option<&Param<Tensor<1>>>,
        make: impl FnOnce(Option<&[f32]>) -> Vec<Epilogue>,
        multiply: impl FnOnce(&mut [Epilogue]) -> R,
    ) -> Option<R> {
        // What is attached to a bias may change its value where it is.
        let stays = bias.is_none_or(|bias| attached(bias).is_empty());
        // Another thread that multiplies meanwhile makes its own.
        let kept = lock(&self.0).take();
        let mut kept = match kept.filter(|kept| stays && kept.is_of(bias)) {
            Some(kept) => kept,
            None => {
                let numbers = bias.map(|bias| read(bias.val())).transpose().ok()?;
                Kept {
                    bias: bias.cloned(),
                    epilogues: make(numbers.as_deref()),
                }
            }
        };
        let result = multiply(&mut kept.epilogues);
        if stays {
            *lock(&self.0) = Some(kept);
        }
        Some(result)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn a_bias_is_read_once_and_again_after_it_changed() {
        let ends = Ends::default();
        let made = std::cell::Cell::new(0);
        let with = |bias: Option<&Param<Tensor<1>>>| {
            let make = |bias: Option<&[f32]>| {
                made.set(made.get() + 1);
                let epilogue = Epilogue::new(2);
                vec![match bias {
                    Some(bias) => epilogue.with_bias(bias),
                    None => epilogue,
                }]
            };
            let found = ends.with(bias, make, |ends| ends[0].clone()).unwrap();
            (found, made.get())
        };
        let of = |numbers: [f32; 2]| Epilogue::new(2).with_bias(&numbers);
        let bias = Param::from_tensor(Tensor::from_floats([1.0, 2.0], &Device::flex()));
        assert_eq!(with(Some(&bias)), (of([1.0, 2.0]), 1));
        assert_eq!(with(Some(&bias)), (of([1.0, 2.0]), 1));
        // A copy has the same value.
        assert_eq!(with(Some(&bias.clone())), (of([1.0, 2.0]), 1));
        let bias = bias.map(|bias| bias * 2.0);
        assert_eq!(with(Some(&bias)), (of([2.0, 4.0]), 2));
        assert_eq!(with(None), (Epilogue::new(2), 3));
        assert_eq!(with(None), (Epilogue::new(2), 3));
    }
}
