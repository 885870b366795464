//! What fake quantization asks of a backend.

use burn::backend::Backend;
use burn::backend::tensor::{BoolTensor, FloatTensor};

use crate::fake::Clip;
use crate::fake::composed;
use crate::format::groups::Groups;
use crate::format::number_format::Grid;

/// What to round to, and which elements share a scale.
#[derive(Debug, Clone)]
pub(crate) struct Rule {
    pub(crate) grid: Grid,
    pub(crate) groups: Groups,
    /// What finite results beyond it become, on either side: the largest number of the dtype that they are
    /// cast to, which would make them infinite. None where they are not cast.
    pub(crate) limit: Option<f32>,
}

/// Which gradients of a learned scale, and how.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) clip: Clip,
    /// Whether the zero point is learned, too.
    pub(crate) zero_point: bool,
}

/// The gradients of fake quantization with a learned scale.
#[derive(Debug)]
pub(crate) struct LearnedGradients<T> {
    pub(crate) x: T,
    pub(crate) scale: T,
    pub(crate) zero_point: Option<T>,
}

/// Fake quantization, its gradients, and ranges. All tensors are F32; scales and zero points
/// `[groups]`.
///
/// The default is [composed](crate::composed) of the backend's operations. A backend whose tensors
/// lie in the host's memory does it in one pass, and so does a kernel of the GPU backends (a range of several
/// groups is composed there). All give the same bits.
pub(crate) trait Kernel: Backend {
    /// What the quantized `x` stands for.
    fn quantize_dequantize(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        zero_point: FloatTensor<Self>,
        rule: &Rule,
    ) -> FloatTensor<Self> {
        composed::quantize_dequantize::<Self>(x, scale, zero_point, rule)
    }

    /// As [`quantize_dequantize`](Self::quantize_dequantize), with where `x` was clipped or is NaN.
    fn quantize_dequantize_masked(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        zero_point: FloatTensor<Self>,
        rule: &Rule,
    ) -> (FloatTensor<Self>, BoolTensor<Self>) {
        composed::quantize_dequantize_masked::<Self>(x, scale, zero_point, rule)
    }

    /// The gradients for an incoming gradient `dy`; that of the zero point where it is wanted.
    fn learned_gradients(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        zero_point: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        rule: &Rule,
        wanted: Wanted,
    ) -> LearnedGradients<FloatTensor<Self>> {
        composed::learned_gradients::<Self>(x, scale, zero_point, dy, rule, wanted)
    }

    /// The lowest and the highest value of each group.
    fn range(x: FloatTensor<Self>, groups: &Groups) -> (FloatTensor<Self>, FloatTensor<Self>) {
        composed::range::<Self>(x, groups)
    }
}

impl Kernel for burn::backend::Capture {}
