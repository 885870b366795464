//! The compressed layout of N:M sparsity.

use burn::tensor::{DType, Device, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use crate::PruneError;
use crate::host::mismatch;
use crate::model::checks::accept;

/// A weight with at most N nonzeros in every M consecutive elements along one axis, stored as N
/// values and N positions for each group of M: the layout that sparse tensor cores read for 2:4
/// ([Accelerating Sparse Deep Neural Networks, Mishra et al.,
/// 2021](https://arxiv.org/abs/2104.08378)).
///
/// Groups run along `axis`, the one that the layer sums over: 0 for the `[d_input, d_output]`
/// weight of a linear layer, 1 for the kernel of a convolution
/// ([`Layer::reduction_axis`](crate::Layer::reduction_axis)). They are stored with that axis
/// last. A position takes ⌈log₂ M⌉ bits, the first in the lowest bits; the positions of a group
/// ascend. Groups with fewer than N nonzeros are filled up with zeros.
///
/// For 2:4 in F16 a group of 8 bytes becomes 4 bytes of values and 4 bits of positions: 0.5625 of
/// the bytes. A [`SparseRecord`](crate::SparseRecord) takes as few, a bit for each element of the
/// group, and loads into a model: this is for what reads the layout itself. It serializes with
/// serde; [`from_parts`](Self::from_parts) takes what was stored in another way.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_prune::NMTensor;
///
/// let device = Device::flex();
/// // Two groups of four, one for each column.
/// let weight = Tensor::<2>::from_floats([[1., 0.], [0., 5.], [0., 0.], [3., 0.]], &device);
/// let compressed = NMTensor::compress(weight.clone(), 2, 4, 0)?;
/// // Positions 0 and 3; then 1, and 0 to fill up, ascending.
/// assert_eq!(compressed.positions(), [0b01_00_11_00]);
/// assert_eq!(compressed.bytes(), 4 * 4 + 1);
/// assert_eq!(compressed.decompress::<2>(&device)?.into_data(), weight.into_data());
///
/// let (values, positions) = (compressed.values().to_vec(), compressed.positions().to_vec());
/// let again = NMTensor::from_parts(2, 4, 0, [4, 2], compressed.dtype(), values, positions)?;
/// assert_eq!(again, compressed);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Parts")]
pub struct NMTensor {
    n: usize,
    m: usize,
    axis: usize,
    shape: Vec<usize>,
    dtype: DType,
    values: Vec<u8>,
    positions: Vec<u8>,
}

impl NMTensor {
    /// Compresses a weight. Keeps its dtype and every bit; -0.0 counts as a nonzero. One read from
    /// the device.
    ///
    /// # Errors
    ///
    /// - [`PruneError::InvalidConfig`]: not 0 < n < m ≤ 256, or the tensor has no such axis.
    /// - [`PruneError::PatternDoesNotDivide`]: the axis is no multiple of m.
    /// - [`PruneError::PatternViolated`]: a group has more than n nonzeros.
    /// - [`PruneError::Device`]: reading failed, or the tensor is quantized.
    pub fn compress<const D: usize>(
        weight: Tensor<D>,
        n: usize,
        m: usize,
        axis: usize,
    ) -> Result<Self, PruneError> {
        let shape = weight.shape().to_vec();
        check(n, m, axis, &shape)?;
        let data = weight.try_into_data().map_err(|error| PruneError::Device {
            reason: error.to_string(),
        })?;
        let dtype = data.dtype();
        if matches!(dtype, DType::QFloat(_)) {
            return Err(PruneError::Device {
                reason: "a quantized weight has no elements to compress".into(),
            });
        }
        let (bytes, width) = (data.as_bytes(), dtype.size());
        let element = |at: usize| &bytes[at * width..][..width];
        let (mut values, mut positions) = (Vec::new(), BitWriter::default());
        for (group, places) in groups(&shape, axis, m).enumerate() {
            let nonzero = |at: &usize| element(*at).iter().any(|byte| *byte != 0);
            let mut kept: Vec<usize> = (0..m).filter(|at| nonzero(&places[*at])).collect();
            if kept.len() > n {
                return Err(PruneError::PatternViolated {
                    pattern: format!("{n}:{m}"),
                    group,
                    first: places[0],
                    nonzeros: kept.len(),
                });
            }
            let zeros: Vec<usize> = (0..m).filter(|at| !kept.contains(at)).collect();
            kept.extend(&zeros[..n - kept.len()]);
            kept.sort_unstable();
            for at in kept {
                values.extend(element(places[at]));
                positions.push(at, position_bits(m));
            }
        }
        Ok(Self {
            n,
            m,
            axis,
            shape,
            dtype,
            values,
            positions: positions.bytes,
        })
    }

    /// A compressed weight from its parts, as [`values`](Self::values) and
    /// [`positions`](Self::positions) return them.
    ///
    /// # Errors
    ///
    /// - [`PruneError::InvalidConfig`]: not 0 < n < m ≤ 256, the shape has no such axis or more
    ///   elements than can be addressed, or the dtype is no plain float.
    /// - [`PruneError::PatternDoesNotDivide`]: the axis is no multiple of m.
    /// - [`PruneError::Mismatch`]: too few or too many bytes.
    /// - [`PruneError::NMPositions`]: the positions of a group do not ascend below m, or bits
    ///   behind the last one are set.
    pub fn from_parts(
        n: usize,
        m: usize,
        axis: usize,
        shape: impl Into<Vec<usize>>,
        dtype: DType,
        values: Vec<u8>,
        positions: Vec<u8>,
    ) -> Result<Self, PruneError> {
        let shape = shape.into();
        check(n, m, axis, &shape)?;
        let name = format!("{dtype:?}");
        accept(dtype.is_float(), "dtype", name, "F32, F16, BF16 or F64")?;
        let mut axes = shape.iter();
        let bits = axes.try_fold(8 * dtype.size(), |bits, axis| bits.checked_mul(*axis));
        let addressable = "of no more elements than can be addressed";
        accept(bits.is_some(), "shape", format!("{shape:?}"), addressable)?;
        let groups = shape.iter().product::<usize>() / m;
        let width = position_bits(m) as usize;
        mismatch(
            "bytes of N:M values",
            groups * n * dtype.size(),
            values.len(),
        )?;
        mismatch(
            "bytes of N:M positions",
            (groups * n * width).div_ceil(8),
            positions.len(),
        )?;
        let wrong = |group, found| PruneError::NMPositions {
            pattern: format!("{n}:{m}"),
            group,
            positions: found,
        };
        let mut reader = BitReader::new(&positions);
        for group in 0..groups {
            let found: Vec<usize> = (0..n).map(|_| reader.next(width as u32)).collect();
            if !found.is_sorted_by(|a, b| a < b) || found[n - 1] >= m {
                return Err(wrong(group, found));
            }
        }
        let behind = 8 * positions.len() - reader.at;
        match reader.next(behind as u32) {
            0 => Ok(Self {
                n,
                m,
                axis,
                shape,
                dtype,
                values,
                positions,
            }),
            set => Err(wrong(groups, vec![set])),
        }
    }

    /// The weight with its zeros, bit by bit what was compressed.
    ///
    /// # Errors
    ///
    /// [`PruneError::Mismatch`] if the weight has not `D` axes.
    pub fn decompress<const D: usize>(&self, device: &Device) -> Result<Tensor<D>, PruneError> {
        if self.shape.len() != D {
            return Err(PruneError::Mismatch {
                what: "axes of the weight",
                expected: self.shape.len(),
                found: D,
            });
        }
        let width = self.dtype.size();
        let mut bytes = vec![0; self.shape.iter().product::<usize>() * width];
        let mut values = self.values.chunks_exact(width);
        let mut positions = BitReader::new(&self.positions);
        for places in groups(&self.shape, self.axis, self.m) {
            for value in values.by_ref().take(self.n) {
                let at = places[positions.next(position_bits(self.m))];
                bytes[at * width..][..width].copy_from_slice(value);
            }
        }
        let data = TensorData::from_bytes_vec(bytes, self.shape.clone(), self.dtype);
        Ok(Tensor::from_data(data, (device, self.dtype)))
    }

    /// Bytes of values and positions together.
    pub fn bytes(&self) -> usize {
        self.values.len() + self.positions.len()
    }

    /// Bytes of the weight with its zeros.
    pub fn dense_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }

    /// N of N:M.
    pub fn n(&self) -> usize {
        self.n
    }

    /// M of N:M.
    pub fn m(&self) -> usize {
        self.m
    }

    /// The axis that groups run along.
    pub fn axis(&self) -> usize {
        self.axis
    }

    /// Shape of the weight.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Dtype of the weight.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The kept values, N for each group, in the dtype of the weight.
    pub fn values(&self) -> &[u8] {
        &self.values
    }

    /// Their positions within the group, packed.
    pub fn positions(&self) -> &[u8] {
        &self.positions
    }
}

/// What is read before it is looked at.
#[derive(Deserialize)]
struct Parts {
    n: usize,
    m: usize,
    axis: usize,
    shape: Vec<usize>,
    dtype: DType,
    values: Vec<u8>,
    positions: Vec<u8>,
}

impl TryFrom<Parts> for NMTensor {
    type Error = PruneError;

    fn try_from(parts: Parts) -> Result<Self, PruneError> {
        Self::from_parts(
            parts.n,
            parts.m,
            parts.axis,
            parts.shape,
            parts.dtype,
            parts.values,
            parts.positions,
        )
    }
}

fn check(n: usize, m: usize, axis: usize, shape: &[usize]) -> Result<(), PruneError> {
    if n == 0 || n >= m || m > 256 {
        return Err(PruneError::InvalidConfig {
            field: "pattern",
            value: format!("{n}:{m}"),
            expected: "N:M with 0 < N < M ≤ 256",
        });
    }
    match shape.get(axis) {
        None => Err(PruneError::InvalidConfig {
            field: "axis",
            value: axis.to_string(),
            expected: "an axis of the weight",
        }),
        Some(size) if !size.is_multiple_of(m) => Err(PruneError::PatternDoesNotDivide {
            pattern: format!("{n}:{m}"),
            path: "weight".into(),
            shape: shape.to_vec(),
            axis,
            multiple: m,
        }),
        Some(_) => Ok(()),
    }
}

/// Row-major indices of each group of `m` along `axis`, that axis running fastest.
fn groups(shape: &[usize], axis: usize, m: usize) -> impl Iterator<Item = Vec<usize>> {
    let stride: usize = shape[axis + 1..].iter().product();
    let block = shape[axis] * stride;
    let blocks = shape[..axis].iter().product::<usize>();
    let per_line = shape[axis] / m;
    (0..blocks).flat_map(move |outer| {
        (0..stride).flat_map(move |inner| {
            (0..per_line).map(move |group| {
                let at = |position| outer * block + inner + (group * m + position) * stride;
                (0..m).map(at).collect()
            })
        })
    })
}

/// ⌈log₂ m⌉.
fn position_bits(m: usize) -> u32 {
    (m - 1).ilog2() + 1
}

/// Numbers of a few bits each, the first in the lowest bits of the first byte.
#[derive(Default)]
struct BitWriter {
    bytes: Vec<u8>,
    used: u32,
}

impl BitWriter {
    fn push(&mut self, number: usize, bits: u32) {
        for bit in 0..bits {
            if self.used.is_multiple_of(8) {
                self.bytes.push(0);
            }
            if number >> bit & 1 == 1
                && let Some(last) = self.bytes.last_mut()
            {
                *last |= 1 << (self.used % 8);
            }
            self.used = (self.used + 1) % 8;
        }
    }
}

struct BitReader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> BitReader<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    fn next(&mut self, bits: u32) -> usize {
        let number = (0..bits as usize)
            .map(|bit| (self.bytes[(self.at + bit) / 8] >> ((self.at + bit) % 8) & 1) as usize)
            .enumerate()
            .map(|(bit, flag)| flag << bit)
            .sum();
        self.at += bits as usize;
        number
    }
}
