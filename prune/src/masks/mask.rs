//! The mask on one weight.

use burn::module::{Module, Param, ParamId, Reparameterization};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_lean_reparam::column_layout::loadable;
use burn_lean_reparam::map_leaf;

use crate::model::carried::{zero_pruned, zero_where};

/// A parameter whose effective value is its base where it is kept and exactly zero elsewhere.
///
/// The zeros do not depend on what the optimizer does to the base: weight decay, momentum left
/// over from before, even a base that became NaN stay behind the mask. Pruned weights get a
/// gradient of exactly zero. [`Module::materialize`] folds the mask in and leaves a plain
/// parameter with zeros.
///
/// Attach it with [`Masks::attach`](crate::Masks::attach). In a record it is the tensor
/// `mask.kept` below the parameter's path: for each weight, row-major, 1 if it is kept and 0 if it
/// is pruned.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_prune::{Layout, LayerKind, Mask, Masks};
///
/// let device = Device::flex().autodiff();
/// let linear = LinearConfig::new(2, 3).with_bias(false).init(&device);
/// let mut layout = Layout::new();
/// layout.push("weight", [2, 3], LayerKind::Linear, 2.0);
/// let linear = Masks::from_support(&layout, &[0, 4])?.attach(linear)?;
/// assert!(linear.weight.reparameterization::<Mask>().is_some());
///
/// let grads = linear.forward(Tensor::<2>::ones([1, 2], &device)).sum().backward();
/// let gradient = linear.weight.base().grad(&grads).unwrap();
/// assert_eq!(gradient.into_data().iter::<f32>().collect::<Vec<_>>(), [1., 0., 0., 0., 1., 0.]);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
#[derive(Module, Debug)]
pub struct Mask {
    // Flat, because a reparameterization has no rank of its own. I32, because each backend stores
    // booleans in its own way, and those of one neither move to another nor load there.
    kept: Param<Tensor<1, Int>>,
}

impl Mask {
    /// A mask of one flag per weight, row-major, `true` = kept.
    pub(crate) fn new(kept: &[bool], device: &Device) -> Self {
        Self {
            kept: Param::initialized(ParamId::new(), zeros_and_ones(kept, device)),
        }
    }

    /// Which weights are kept, `[weights]`, row-major.
    pub fn kept(&self) -> Tensor<1, Bool> {
        self.kept.val().not_equal_elem(0)
    }
}

impl Reparameterization for Mask {
    const NAME: &'static str = "mask";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        // Not `kept`, inverted: one tensor of flags in each pass.
        zero_where(base, self.kept.val().equal_elem(0))
    }
}

/// The parameter with zeros in its base wherever `kept` is false; identity and training state
/// stay. One that records hold transposed still loads.
pub(crate) fn zero_base<const D: usize>(
    param: Param<Tensor<D>>,
    kept: Tensor<1, Bool>,
) -> Param<Tensor<D>> {
    loadable(map_leaf(param, |base| zero_pruned(base, kept)))
}

/// Flags as a mask stores them.
pub(crate) fn zeros_and_ones(kept: &[bool], device: &Device) -> Tensor<1, Int> {
    let kept: Vec<i32> = kept.iter().map(|kept| i32::from(*kept)).collect();
    let count = kept.len();
    Tensor::from_data(TensorData::new(kept, [count]), (device, DType::I32))
}
