//! The gradient matrix G `[n, p]`: row i is the gradient of Fisher sample i.
//!
//! GᵀG/n is the empirical Fisher; it is never formed. Everything the solver does with G is here:
//! push rows, multiply from either side, gather columns.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};

use crate::error::PruneError;

/// Bytes of one block of columns: well below the largest buffer of small GPUs.
const BLOCK_BYTES: usize = 64 << 20;
/// Bytes of F32 columns that are gathered or widened at once.
const CHUNK_BYTES: usize = 32 << 20;

/// The gradients of n Fisher samples with respect to p weights, on a device.
///
/// Storage is F32 or half; every product is computed in F32.
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
}

/// Consecutive columns of G.
#[derive(Debug, Clone)]
struct Block {
    /// Index of the first column.
    start: usize,
    /// `[n, columns]`
    values: Tensor<2>,
}

impl Block {
    fn end(&self) -> usize {
        self.start + self.values.dims()[1]
    }
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
        let blocks = (0..parameters)
            .step_by(width)
            .map(|start| Block {
                start,
                values: Tensor::zeros(
                    [samples, width.min(parameters - start)],
                    (device, DType::from(dtype)),
                ),
            })
            .collect();
        Ok(Self {
            blocks,
            samples,
            parameters,
            filled: 0,
            dtype,
            scale: None,
        })
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
            blocks: vec![Block { start: 0, values }],
            samples,
            parameters,
            filled: samples,
            dtype,
            scale: None,
        })
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
        self.push_parts(count, vec![(0, rows)])
    }

    /// Appends `count` rows that come as parts `[count, columns]`, each with its first column;
    /// columns without a part stay zero.
    pub(crate) fn push_parts(
        &mut self,
        count: usize,
        parts: Vec<(usize, Tensor<2>)>,
    ) -> Result<(), PruneError> {
        let (filled, end) = (self.filled, self.filled + count);
        if end > self.samples {
            return Err(PruneError::Mismatch {
                what: "rows of the gradient matrix",
                expected: self.samples,
                found: end,
            });
        }
        if count == 0 {
            return Ok(());
        }
        for (first, part) in parts {
            let [_, width] = part.dims();
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
                let new = new.cast(self.dtype);
                let columns = start - block.start..stop - block.start;
                // Written in place: nobody else holds the block while it is out.
                block
                    .values
                    .inplace(|values| values.slice_assign([filled..end, columns], new));
            }
        }
        self.filled = end;
        Ok(())
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

    /// Bytes that it occupies.
    pub fn bytes(&self) -> usize {
        Self::bytes_needed(self.samples, self.parameters, self.dtype)
    }

    /// Where it is.
    pub fn device(&self) -> Device {
        self.blocks[0].values.device()
    }

    /// G v for a vector of length p, in F32; widened to F64 for the host.
    pub(crate) fn multiply(&self, vector: &[f32]) -> Result<Vec<f64>, PruneError> {
        let mut product = vec![0.0; self.samples];
        for (start, values) in self.slices(self.width()) {
            let columns = values.dims()[1];
            let part = column(&vector[start..start + columns], &values.device());
            for (sum, term) in product.iter_mut().zip(read(values.matmul(part))?) {
                *sum += f64::from(term);
            }
        }
        if let Some(scale) = &self.scale {
            let pairs = product.iter_mut().zip(scale);
            pairs.for_each(|(value, scale)| *value *= f64::from(*scale));
        }
        Ok(product)
    }

    /// Gᵀ u for a vector of length n.
    pub(crate) fn transpose_multiply(&self, vector: &[f32]) -> Result<Vec<f32>, PruneError> {
        let row = column(&self.scaled(vector), &self.device()).transpose();
        let mut product = Vec::with_capacity(self.parameters);
        for (_, values) in self.slices(self.width()) {
            product.extend(read(row.clone().matmul(values))?);
        }
        Ok(product)
    }

    /// G_S v for the columns at `indices` (ascending).
    pub(crate) fn multiply_at(
        &self,
        indices: &[usize],
        vector: &[f32],
    ) -> Result<Vec<f64>, PruneError> {
        if self.prefers_all(indices) {
            let mut all = vec![0.0; self.parameters];
            let pairs = indices.iter().zip(vector);
            pairs.for_each(|(index, value)| all[*index] = *value);
            return self.multiply(&all);
        }
        let mut product = vec![0.0; self.samples];
        for (first, values) in self.chunks(indices) {
            let part = &vector[first..first + values.dims()[1]];
            let part = column(part, &values.device());
            for (sum, term) in product.iter_mut().zip(read(values.matmul(part))?) {
                *sum += f64::from(term);
            }
        }
        Ok(product)
    }

    /// G_Sᵀ u for the columns at `indices` (ascending).
    pub(crate) fn transpose_multiply_at(
        &self,
        indices: &[usize],
        vector: &[f32],
    ) -> Result<Vec<f32>, PruneError> {
        if self.prefers_all(indices) {
            let all = self.transpose_multiply(vector)?;
            return Ok(indices.iter().map(|index| all[*index]).collect());
        }
        let row = column(vector, &self.device()).transpose();
        let mut product = Vec::with_capacity(indices.len());
        for (_, values) in self.chunks(indices) {
            product.extend(read(row.clone().matmul(values))?);
        }
        Ok(product)
    }

    /// Whether a pass over all columns costs less than gathering these: memory is read in order at
    /// several times the speed.
    fn prefers_all(&self, indices: &[usize]) -> bool {
        indices.len() * 5 > self.parameters
    }

    /// For each column a the squared norm ‖W a‖², for W `[m, n]`, row-major.
    pub(crate) fn projected_norms(&self, projection: Vec<f32>) -> Result<Vec<f64>, PruneError> {
        let rows = projection.len() / self.samples;
        let shape = [rows, self.samples];
        let rows_of = projection.chunks_exact(self.samples);
        let projection: Vec<f32> = rows_of.flat_map(|row| self.scaled(row)).collect();
        let projection: Tensor<2> =
            Tensor::from_data(TensorData::new(projection, shape), &self.device());
        let mut norms = Vec::with_capacity(self.parameters);
        let width = (CHUNK_BYTES / (4 * rows.max(self.samples))).max(1);
        for (_, values) in self.slices(width) {
            let projected = projection.clone().matmul(values);
            let squares = read((projected.clone() * projected).sum_dim(0))?;
            norms.extend(squares.into_iter().map(f64::from));
        }
        Ok(norms)
    }

    /// The squared norm of each column.
    pub(crate) fn square_norms(&self) -> Result<Vec<f64>, PruneError> {
        let mut norms = Vec::with_capacity(self.parameters);
        for (_, values) in self.slices((CHUNK_BYTES / (4 * self.samples)).max(1)) {
            let values = self.scale_rows(values);
            let squares = read((values.clone() * values).sum_dim(0))?;
            norms.extend(squares.into_iter().map(f64::from));
        }
        Ok(norms)
    }

    /// The columns at `indices` (ascending), in F32, a chunk at a time: `[n, columns]` each, with
    /// its first position in `indices`.
    pub(crate) fn chunks<'a>(
        &'a self,
        indices: &'a [usize],
    ) -> impl Iterator<Item = (usize, Tensor<2>)> + 'a {
        let width = (CHUNK_BYTES / (4 * self.samples)).max(1);
        self.blocks.iter().flat_map(move |block| {
            let from = indices.partition_point(|index| *index < block.start);
            let to = indices.partition_point(|index| *index < block.end());
            (from..to).step_by(width).map(move |first| {
                let chunk = &indices[first..to.min(first + width)];
                (
                    first,
                    self.scale_rows(block.select(chunk).cast(FloatDType::F32)),
                )
            })
        })
    }

    /// The columns at `indices` (ascending) as one tensor `[n, columns]` in F32.
    pub(crate) fn columns(&self, indices: &[usize]) -> Tensor<2> {
        let mut parts: Vec<Tensor<2>> = self
            .blocks
            .iter()
            .filter_map(|block| {
                let from = indices.partition_point(|index| *index < block.start);
                let to = indices.partition_point(|index| *index < block.end());
                (from < to).then(|| block.select(&indices[from..to]).cast(FloatDType::F32))
            })
            .collect();
        self.scale_rows(match parts.len() {
            1 => parts.remove(0),
            _ => Tensor::cat(parts, 1),
        })
    }

    /// The same gradients, each divided by its length to the power of `exponent`, times one
    /// constant that keeps the sum of their squared lengths. Zero rows stay zero.
    pub(crate) fn tempered(&self, exponent: f64) -> Result<Self, PruneError> {
        let mut norms = vec![0.0; self.samples];
        let width = (CHUNK_BYTES / (4 * self.samples)).max(1);
        for (_, values) in self.slices(width) {
            let squares = read((values.clone() * values).sum_dim(1))?;
            let pairs = norms.iter_mut().zip(squares);
            pairs.for_each(|(norm, square)| *norm += f64::from(square));
        }
        let factor = |norm: f64| match norm > 0.0 {
            true => norm.powf(-0.5 * exponent),
            false => 1.0,
        };
        let before: f64 = norms.iter().sum();
        let after: f64 = norms.iter().map(|norm| norm * factor(*norm).powi(2)).sum();
        let keep = match after > 0.0 {
            true => (before / after).sqrt(),
            false => 1.0,
        };
        let scale = norms.iter().map(|norm| (keep * factor(*norm)) as f32);
        Ok(Self {
            scale: Some(scale.collect()),
            ..self.clone()
        })
    }

    /// The factors of the rows times a vector of length n.
    fn scaled(&self, vector: &[f32]) -> Vec<f32> {
        match &self.scale {
            Some(scale) => vector.iter().zip(scale).map(|(v, s)| v * s).collect(),
            None => vector.to_vec(),
        }
    }

    /// The factors of the rows times columns `[n, c]`.
    fn scale_rows(&self, columns: Tensor<2>) -> Tensor<2> {
        match &self.scale {
            Some(scale) => {
                let scale = column(scale, &columns.device());
                columns * scale
            }
            None => columns,
        }
    }

    /// One row, in F32, as it is stored.
    pub fn row(&self, sample: usize) -> Result<Vec<f32>, PruneError> {
        let mut row = Vec::with_capacity(self.parameters);
        for block in &self.blocks {
            let width = block.values.dims()[1];
            row.extend(read(
                block.values.clone().slice([sample..sample + 1, 0..width]),
            )?);
        }
        Ok(row)
    }

    /// Indices of the columns that are zero in every row, ascending.
    pub(crate) fn dead_columns(&self) -> Result<Vec<usize>, PruneError> {
        // One product with positive factors, all different, finds the candidates: a sum other than
        // zero proves a column alive. The few zeros are looked at one by one, since terms cancel.
        let golden = 0.5 * (5f64.sqrt() - 1.0);
        let factors: Vec<f32> = (0..self.samples)
            .map(|row| (1.0 + (row as f64 * golden).fract()) as f32)
            .collect();
        let sums = self.transpose_multiply(&factors)?;
        let suspects: Vec<usize> = (0..self.parameters)
            .filter(|index| sums[*index] == 0.0)
            .collect();
        let mut dead = Vec::new();
        for (first, columns) in self.chunks(&suspects) {
            let largest = read(columns.abs().max_dim(0))?;
            let zeros = largest.iter().zip(&suspects[first..]);
            dead.extend(
                zeros
                    .filter(|(largest, _)| **largest == 0.0)
                    .map(|(_, index)| *index),
            );
        }
        Ok(dead)
    }

    /// Columns that are multiplied at once: all of them, unless they must be widened first.
    fn width(&self) -> usize {
        match self.dtype {
            FloatDType::F32 => self.parameters,
            _ => (CHUNK_BYTES / (4 * self.samples)).max(1),
        }
    }

    /// All columns in F32, at most `width` at a time, with the index of the first one.
    fn slices(&self, width: usize) -> impl Iterator<Item = (usize, Tensor<2>)> + '_ {
        self.blocks.iter().flat_map(move |block| {
            (block.start..block.end()).step_by(width).map(move |first| {
                let end = block.end().min(first + width);
                let columns = first - block.start..end - block.start;
                let values = match columns.len() == block.values.dims()[1] {
                    true => block.values.clone(),
                    false => block.values.clone().slice([0..self.samples, columns]),
                };
                (first, values.cast(FloatDType::F32))
            })
        })
    }
}

impl Block {
    /// The columns at these indices of G.
    fn select(&self, indices: &[usize]) -> Tensor<2> {
        if indices.len() == self.values.dims()[1] {
            return self.values.clone();
        }
        let local: Vec<i64> = indices
            .iter()
            .map(|index| (index - self.start) as i64)
            .collect();
        let count = local.len();
        let local =
            Tensor::<1, Int>::from_data(TensorData::new(local, [count]), &self.values.device());
        self.values.clone().select(1, local)
    }
}

/// A host vector as a column `[len, 1]`.
pub(crate) fn column(vector: &[f32], device: &Device) -> Tensor<2> {
    Tensor::from_data(TensorData::new(vector.to_vec(), [vector.len(), 1]), device)
}

/// The values of a tensor on the host, in F32.
pub(crate) fn read<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>, PruneError> {
    let failed = |reason: String| PruneError::Device { reason };
    let data = tensor
        .cast(FloatDType::F32)
        .try_into_data()
        .map_err(|error| failed(error.to_string()))?;
    data.try_into_vec::<f32>()
        .map_err(|error| failed(format!("{error:?}")))
}

/// Fails where two sizes that belong together differ.
pub(crate) fn mismatch(
    what: &'static str,
    expected: usize,
    found: usize,
) -> Result<(), PruneError> {
    match expected == found {
        true => Ok(()),
        false => Err(PruneError::Mismatch {
            what,
            expected,
            found,
        }),
    }
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
