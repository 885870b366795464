//! Keys and values of an attention, as floats or in 8 bits.

use burn::tensor::{DType, Device, FloatDType, Int, IntDType, Tensor};
use burn_lean_graph::{Form, TensorMapper, Tensors, tensors};
use burn_lean_reparam::recorded_device;
use serde::{Deserialize, Serialize};

use super::tokens::codes;

/// How keys and values are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum KvFormat {
    /// As they come.
    #[default]
    Float,
    /// Whole numbers from −127 to 127 with an F32 scale for each head and position, its largest
    /// magnitude over 127: in F32 no number is off by more than half a scale (halves are rounded again
    /// to their own digits), and what was once kept does not change.
    Int8,
}

/// Keys and values of the positions so far of one attention, `[batch, heads, positions, features]`.
///
/// It goes with the inputs through a recorded forward pass and comes back with the results
/// ([`Tensors`]): `quantized.run(&model, (tokens, cache), |model, (tokens, mut cache)| …)`, which returns
/// `(logits, cache)`. Attentions of `burn-nn` take it in [`ForwardQ`](crate::ForwardQ).
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::{KvCache, KvFormat};
///
/// let device = Device::flex();
/// let mut cache = KvCache::new(KvFormat::Int8);
/// let one = Tensor::<4>::ones([1, 2, 1, 32], &device);
/// let (keys, values) = cache.extend(one.clone(), one.clone());
/// let (keys, values) = cache.extend(one.clone(), one * 0.5);
/// assert_eq!((keys.dims(), cache.positions()), ([1, 2, 2, 32], 2));
/// // Keys and values of 2 positions and 2 heads: 32 codes and a scale each, of which F32 has 128.
/// assert_eq!(cache.bytes(), 2 * 2 * 2 * (32 + 4));
/// ```
#[derive(Debug, Clone, Default)]
pub struct KvCache {
    format: KvFormat,
    keys: Option<Kept>,
    values: Option<Kept>,
}

/// What is kept of a tensor.
#[derive(Debug, Clone)]
enum Kept {
    Float(Box<Tensor<4>>),
    Codes(Box<Codes>),
}

#[derive(Debug, Clone)]
struct Codes {
    codes: Tensor<4, Int>,
    scales: Tensor<4>,
    /// The dtype of what was kept.
    dtype: FloatDType,
}

tensors!(KvCache { keys, values; format });
tensors!(Codes { codes, scales; dtype });

impl Tensors for Kept {
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
        match self {
            Self::Float(x) => Self::Float(x.map_tensors(mapper)),
            Self::Codes(codes) => Self::Codes(codes.map_tensors(mapper)),
        }
    }

    fn describe(&self, form: &mut Form) {
        form.kind(std::mem::discriminant(self));
        match self {
            Self::Float(x) => x.describe(form),
            Self::Codes(codes) => codes.describe(form),
        }
    }
}

impl KvCache {
    /// Nothing yet.
    pub fn new(format: KvFormat) -> Self {
        Self {
            format,
            keys: None,
            values: None,
        }
    }

    /// Appends keys and values of further positions, and returns those of all positions as they are
    /// read back, the new ones among them: an attention sees the same numbers whether positions come
    /// one by one or all at once.
    ///
    /// # Panics
    ///
    /// If batch, heads or features are not those of the positions so far, or the values are of other
    /// positions than the keys.
    pub fn extend(&mut self, keys: Tensor<4>, values: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
        let [positions, found] = [&keys, &values].map(|one| one.dims()[2]);
        assert_eq!(positions, found, "keys and values of as many positions");
        let extend = |kept: &mut Option<Kept>, new: Tensor<4>| {
            let new = Kept::new(new, self.format);
            let all = match kept.take() {
                None => new,
                Some(old) => old.followed_by(new),
            };
            let values = all.values();
            *kept = Some(all);
            values
        };
        let keys = extend(&mut self.keys, keys);
        (keys, extend(&mut self.values, values))
    }

    /// Keys and values of all positions as they are read back, where there are any.
    pub fn read(&self) -> Option<(Tensor<4>, Tensor<4>)> {
        let values = |kept: &Option<Kept>| kept.as_ref().map(Kept::values);
        Some((values(&self.keys)?, values(&self.values)?))
    }

    /// How many positions there are.
    pub fn positions(&self) -> usize {
        self.keys.as_ref().map_or(0, |kept| kept.dims()[2])
    }

    /// Bytes of what is kept. Codes take the narrowest integers that the device has: one byte each
    /// on CPUs, four on devices that know 32 bits only.
    pub fn bytes(&self) -> usize {
        let kept = self.keys.iter().chain(&self.values);
        kept.map(Kept::bytes).sum()
    }
}

impl Kept {
    fn new(x: Tensor<4>, format: KvFormat) -> Self {
        match format {
            KvFormat::Float => Self::Float(Box::new(x)),
            KvFormat::Int8 => {
                let narrowest = narrowest(&x.device());
                let dtype = FloatDType::from(x.dtype());
                let (codes, scales) = codes(x, 8);
                Self::Codes(Box::new(Codes {
                    codes: codes.int().cast(narrowest),
                    scales,
                    dtype,
                }))
            }
        }
    }

    fn followed_by(self, new: Self) -> Self {
        match (self, new) {
            (Self::Float(old), Self::Float(new)) => {
                Self::Float(Box::new(Tensor::cat(vec![*old, *new], 2)))
            }
            (Self::Codes(old), Self::Codes(new)) => Self::Codes(Box::new(Codes {
                codes: Tensor::cat(vec![old.codes, new.codes], 2),
                scales: Tensor::cat(vec![old.scales, new.scales], 2),
                dtype: old.dtype,
            })),
            _ => unreachable!("a cache has one format"),
        }
    }

    fn values(&self) -> Tensor<4> {
        match self {
            Self::Float(x) => (**x).clone(),
            Self::Codes(kept) => {
                let codes = kept.codes.clone().float().cast(DType::F32);
                (codes * kept.scales.clone()).cast(kept.dtype)
            }
        }
    }

    fn dims(&self) -> [usize; 4] {
        match self {
            Self::Float(x) => x.dims(),
            Self::Codes(kept) => kept.codes.dims(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Float(x) => x.shape().num_elements() * x.dtype().size(),
            Self::Codes(kept) => {
                kept.codes.shape().num_elements() * kept.codes.dtype().size()
                    + kept.scales.shape().num_elements() * kept.scales.dtype().size()
            }
        }
    }
}

/// The narrowest integers that a device has.
fn narrowest(device: &Device) -> IntDType {
    let (known, device) = ([IntDType::I8, IntDType::I16], recorded_device(device));
    let found = known.into_iter().find(|one| device.supports_dtype(*one));
    found.unwrap_or(IntDType::I32)
}
