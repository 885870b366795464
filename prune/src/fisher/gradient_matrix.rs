//! The gradient matrix G `[n, p]`: row i is the gradient of Fisher sample i.
//!
//! GᵀG/n is the empirical Fisher; it is never formed. What the solver does with G, products from
//! either side and gathered columns, is in `products`.

mod block;
mod file;
mod products;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};

use crate::error::PruneError;
use crate::host::{mismatch, read};
use block::Block;
use file::NumberFile;

/// Bytes of one block of columns: well below the largest buffer of small GPUs.
const BLOCK_BYTES: usize = 64 << 20;
/// Part of the memory bound that a block of a matrix in a file may take: it is held with copies of some of
/// its columns.
const BLOCK_SHARE: usize = 8;
/// Bytes of F32 columns that are gathered or widened at once on a GPU.
const DEVICE_CHUNK_BYTES: usize = 32 << 20;
/// The same in the host's memory: what the allocator hands out again and the cache holds.
const HOST_CHUNK_BYTES: usize = 4 << 20;

/// The gradients of n Fisher samples with respect to p weights, on a device.
///
/// Storage is F32 or half; every product is computed in F32. On CUDA with Burn's `autotune` that may be TF32,
/// with 10 bits for the digits of factors.
///
/// ```
/// use burn::tensor::{Device, FloatDType, Tensor};
/// use burn_lean_prune::GradientMatrix;
///
/// let device = Device::flex();
/// assert_eq!(GradientMatrix::bytes_needed(2, 3, FloatDType::F32), 24);
/// let mut gradients = GradientMatrix::with_capacity(2, 3, FloatDType::F32, &device)?;
/// gradients.push(Tensor::from_floats([[1., 0., 2.]], &device))?;
/// gradients.push(Tensor::from_floats([[0., 0., 4.]], &device))?;
/// assert_eq!((gradients.filled(), gradients.bytes()), (2, 24));
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
#[derive(Debug, Clone)]
pub struct GradientMatrix {
    blocks: Vec<Block>,
    samples: usize,
    parameters: usize,
    filled: usize,
    dtype: FloatDType,
    /// Factor of each row in every product, `[n]`.
    scale: Option<Vec<f32>>,
    /// Bytes that may be in memory, where the matrix is in a file.
    memory_bound: Option<usize>,
}

impl GradientMatrix {
    /// Bytes that a matrix of n samples and p parameters occupies.
    pub fn bytes_needed(samples: usize, parameters: usize, dtype: FloatDType) -> usize {
        samples
            .saturating_mul(parameters)
            .saturating_mul(bytes_of(dtype))
    }

    /// Reserves room for n samples and p parameters; all of it, now.
    ///
    /// # Errors
    ///
    /// [`PruneError::NoSamples`], [`PruneError::NoPrunableParameter`], and
    /// [`PruneError::UnsupportedDtype`] where `dtype` is none of F32, F16 and BF16 or the device
    /// cannot compute in it.
    pub fn with_capacity(
        samples: usize,
        parameters: usize,
        dtype: FloatDType,
        device: &Device,
    ) -> Result<Self, PruneError> {
        check(samples, parameters, dtype, device)?;
        let width = (BLOCK_BYTES / (samples * bytes_of(dtype))).max(1);
        let block = |start, shape| {
            Block::in_memory(start, Tensor::zeros(shape, (device, DType::from(dtype))))
        };
        Ok(Self::of_blocks(samples, parameters, dtype, width, block))
    }

    /// A matrix in a file without a name in `folder`, whose products are made of some columns at a
    /// time on `device`. Clones share the file: it must be full before there are any.
    pub(crate) fn in_file(
        samples: usize,
        parameters: usize,
        dtype: FloatDType,
        device: &Device,
        folder: &Path,
        memory_bound: usize,
    ) -> Result<Self, PruneError> {
        check(samples, parameters, dtype, device)?;
        let numbers = samples as u64 * parameters as u64;
        let file = Arc::new(NumberFile::create(folder, dtype, numbers)?);
        let bytes = BLOCK_BYTES.min(memory_bound / BLOCK_SHARE);
        let width = (bytes / (samples * bytes_of(FloatDType::F32))).max(1);
        let block = |start, shape| Block::in_file(start, file.clone(), shape, device.clone());
        Ok(Self {
            memory_bound: Some(memory_bound),
            ..Self::of_blocks(samples, parameters, dtype, width, block)
        })
    }

    /// Without a row, in blocks of so many columns.
    fn of_blocks(
        samples: usize,
        parameters: usize,
        dtype: FloatDType,
        width: usize,
        block: impl Fn(usize, [usize; 2]) -> Block,
    ) -> Self {
        let starts = (0..parameters).step_by(width);
        Self {
            blocks: starts
                .map(|start| block(start, [samples, width.min(parameters - start)]))
                .collect(),
            samples,
            parameters,
            filled: 0,
            dtype,
            scale: None,
            memory_bound: None,
        }
    }

    /// Takes over a matrix `[n, p]` as it is.
    ///
    /// # Errors
    ///
    /// As [`with_capacity`](Self::with_capacity).
    pub fn from_tensor(values: Tensor<2>) -> Result<Self, PruneError> {
        let [samples, parameters] = values.dims();
        let dtype = FloatDType::from(values.dtype());
        check(samples, parameters, dtype, &values.device())?;
        Ok(Self {
            blocks: vec![Block::in_memory(0, values)],
            samples,
            parameters,
            filled: samples,
            dtype,
            scale: None,
            memory_bound: None,
        })
    }

    /// The rows of several matrices as one, on the device and in the dtype of the first: Fisher samples
    /// that were collected on several devices or in several processes, each over its own examples, at
    /// the same weights.
    ///
    /// The rows that they have so far, in this order, bit by bit where the dtypes are the same. The
    /// problem is that of a collection in one go: nothing else of it is a sum. Where one of them is in a file,
    /// and all rows are beyond its [`memory_bound`](crate::FisherConfig::memory_bound), they go to a file in
    /// its folder, with that bound; else they are in memory.
    ///
    /// # Errors
    ///
    /// [`PruneError::Mismatch`] where they have different numbers of weights,
    /// [`PruneError::NoSamples`] without a row, [`PruneError::Device`], [`PruneError::Io`].
    pub fn concat(shards: &[Self]) -> Result<Self, PruneError> {
        let first = shards.first().ok_or(PruneError::NoSamples)?;
        let (parameters, device) = (first.parameters, first.device());
        let samples = shards.iter().map(|shard| shard.filled).sum();
        let needed = Self::bytes_needed(samples, parameters, first.dtype);
        let mut files = shards.iter().filter_map(Self::file);
        let mut whole = match files.find(|(_, bound)| needed > *bound) {
            Some((folder, bound)) => {
                Self::in_file(samples, parameters, first.dtype, &device, folder, bound)?
            }
            None => Self::with_capacity(samples, parameters, first.dtype, &device)?,
        };
        let mut scale = Vec::with_capacity(samples);
        for shard in shards.iter().filter(|shard| shard.filled > 0) {
            mismatch("weights per gradient", parameters, shard.parameters)?;
            let factors = shard.scale.as_deref();
            scale.extend((0..shard.filled).map(|row| factors.map_or(1.0, |all| all[row])));
            let rows = whole.filled..whole.filled + shard.filled;
            for block in &shard.blocks {
                let part = block.part(0..shard.filled, 0..block.width())?;
                whole.write(rows.clone(), block.start, part.to_device(&device))?;
            }
            whole.filled = rows.end;
        }
        let is_scaled = shards.iter().any(|shard| shard.scale.is_some());
        whole.scale = is_scaled.then_some(scale);
        Ok(whole)
    }

    /// Appends the rows `[r, p]`, in F32.
    ///
    /// # Errors
    ///
    /// [`PruneError::Mismatch`] where the rows have another length or there is no room for them;
    /// the matrix is unchanged then.
    pub fn push(&mut self, rows: Tensor<2>) -> Result<(), PruneError> {
        let [count, parameters] = rows.dims();
        mismatch("weights per gradient", self.parameters, parameters)?;
        let (filled, end) = (self.filled, self.filled + count);
        if end > self.samples {
            return Err(PruneError::Mismatch {
                what: "rows of the gradient matrix",
                expected: self.samples,
                found: end,
            });
        }
        if count > 0 {
            self.write(filled..end, 0, rows)?;
        }
        self.filled = end;
        Ok(())
    }

    /// Writes a part `[rows, columns]` of some rows; `first` is its first column.
    pub(crate) fn write(
        &mut self,
        rows: Range<usize>,
        first: usize,
        part: Tensor<2>,
    ) -> Result<(), PruneError> {
        let [count, width] = part.dims();
        for block in &mut self.blocks {
            let start = first.max(block.start);
            let stop = (first + width).min(block.end());
            if start >= stop {
                continue;
            }
            let new = match stop - start == width {
                true => part.clone(),
                false => part.clone().slice([0..count, start - first..stop - first]),
            };
            let columns = start - block.start..stop - block.start;
            block.write(rows.clone(), columns, new, self.dtype)?;
        }
        Ok(())
    }

    /// Begins again, with zeros.
    pub(crate) fn restart(&mut self) -> Result<(), PruneError> {
        let filled = std::mem::take(&mut self.filled);
        for block in &mut self.blocks {
            let shape = [filled, block.width()];
            let zeros = Tensor::zeros(shape, (&block.device(), DType::F32));
            block.write(0..filled, 0..shape[1], zeros, self.dtype)?;
        }
        Ok(())
    }

    /// Counts `count` more rows as filled.
    pub(crate) fn advance(&mut self, count: usize) {
        self.filled += count;
    }

    /// Rows that it is made for: Fisher samples n.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// Rows that it has so far.
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// Columns: prunable weights p.
    pub fn parameters(&self) -> usize {
        self.parameters
    }

    /// Storage dtype.
    pub fn dtype(&self) -> FloatDType {
        self.dtype
    }

    /// Bytes that it occupies: in memory, or in its file.
    pub fn bytes(&self) -> usize {
        Self::bytes_needed(self.samples, self.parameters, self.dtype)
    }

    /// The folder of the file that it is in, if it is in one, and the bytes that may be in memory.
    fn file(&self) -> Option<(&Path, usize)> {
        let folder = self.blocks.first()?.folder()?;
        Some((folder, self.memory_bound?))
    }

    /// Whether it is in a file.
    pub fn is_on_disk(&self) -> bool {
        self.memory_bound.is_some()
    }

    /// Where it is, or where what comes from its file is computed with.
    pub fn device(&self) -> Device {
        self.blocks[0].device()
    }

    /// Every element of some rows, in F32, with their factors: its row, counted from the first of
    /// them, its column, and its value.
    pub(crate) fn each_of_rows(
        &self,
        rows: Range<usize>,
        mut take: impl FnMut(usize, usize, f32),
    ) -> Result<(), PruneError> {
        for block in &self.blocks {
            let width = block.width();
            let values = read(block.part(rows.clone(), 0..width)?)?;
            for (row, values) in values.chunks_exact(width).enumerate() {
                let factor = self
                    .scale
                    .as_ref()
                    .map_or(1.0, |scale| scale[rows.start + row]);
                let columns = block.start..block.end();
                columns
                    .zip(values)
                    .for_each(|(column, value)| take(row, column, factor * value));
            }
        }
        Ok(())
    }

    /// One row `[p]`, in F32, as it was pushed.
    ///
    /// # Errors
    ///
    /// [`PruneError::Device`], [`PruneError::Io`].
    ///
    /// # Panics
    ///
    /// Unless `sample` is one of the n.
    pub fn row(&self, sample: usize) -> Result<Vec<f32>, PruneError> {
        let mut row = Vec::with_capacity(self.parameters);
        for block in &self.blocks {
            row.extend(read(block.part(sample..sample + 1, 0..block.width())?)?);
        }
        Ok(row)
    }
}

/// A host vector as a column `[len, 1]`.
pub(crate) fn column(vector: &[f32], device: &Device) -> Tensor<2> {
    let data = TensorData::new(vector.to_vec(), [vector.len(), 1]);
    Tensor::from_data(data, (device, DType::F32))
}

/// Adds `factor` times the product of columns `[n, c]` with a host vector, in F64.
pub(crate) fn add_product(
    sums: &mut [f64],
    factor: f64,
    columns: &Tensor<2>,
    vector: &[f32],
) -> Result<(), PruneError> {
    let vector = column(vector, &columns.device());
    let product = read(columns.clone().matmul(vector))?;
    for (sum, term) in sums.iter_mut().zip(product) {
        *sum += factor * f64::from(term);
    }
    Ok(())
}

fn bytes_of(dtype: FloatDType) -> usize {
    match dtype {
        FloatDType::F64 => 8,
        FloatDType::F16 | FloatDType::BF16 => 2,
        _ => 4,
    }
}

fn check(
    samples: usize,
    parameters: usize,
    dtype: FloatDType,
    device: &Device,
) -> Result<(), PruneError> {
    if samples == 0 {
        return Err(PruneError::NoSamples);
    }
    if parameters == 0 {
        return Err(PruneError::NoPrunableParameter);
    }
    let stored = matches!(dtype, FloatDType::F32 | FloatDType::F16 | FloatDType::BF16);
    if !stored || !device.supports_dtype(dtype) {
        return Err(PruneError::UnsupportedDtype {
            dtype,
            device: format!("{device:?}"),
        });
    }
    Ok(())
}
