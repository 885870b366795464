//! Products with the gradient matrix, and the columns it gives out: always in F32, whatever the
//! storage, and with the factors of the rows where samples are weighed. On CUDA with Burn's `autotune` the
//! products may be in TF32: CubeCL tries such kernels, too.

use std::ops::Range;

use burn::tensor::{FloatDType, Tensor};
use burn_lean_reparam::reductions;

use super::block::select;
use super::{DEVICE_CHUNK_BYTES, GradientMatrix, HOST_CHUNK_BYTES, add_product, column};
use crate::error::PruneError;
use crate::host::{in_host_memory, read};

/// Numbers that may be kept of any matrix: 96 MiB in F32.
const RESIDENT: usize = 24 << 20;

/// The largest factor of a row, with room for what the rows are then added up with in F32.
const MOST_SCALE: f64 = 5e33;

impl GradientMatrix {
    /// G v for a vector of length p, in F32; widened to F64 for the host.
    pub(crate) fn multiply(&self, vector: &[f32]) -> Result<Vec<f64>, PruneError> {
        let mut product = vec![0.0; self.samples];
        for slice in self.slices(self.width()) {
            let (start, values) = slice?;
            let end = start + values.dims()[1];
            add_product(&mut product, 1.0, &values, &vector[start..end])?;
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
        for slice in self.slices(self.width()) {
            let (_, values) = slice?;
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
        for chunk in self.chunks(indices) {
            let (first, values) = chunk?;
            let end = first + values.dims()[1];
            add_product(&mut product, 1.0, &values, &vector[first..end])?;
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
        for chunk in self.chunks(indices) {
            let (_, values) = chunk?;
            product.extend(read(row.clone().matmul(values))?);
        }
        Ok(product)
    }

    /// Whether a pass over all columns costs less than gathering these: memory is read in order at
    /// some fifteen times the speed.
    pub(crate) fn prefers_all(&self, indices: &[usize]) -> bool {
        indices.len() * 16 > self.parameters
    }

    /// The squared norm of each column.
    pub(crate) fn square_norms(&self) -> Result<Vec<f64>, PruneError> {
        let mut norms = Vec::with_capacity(self.parameters);
        for slice in self.slices(self.chunk_width()) {
            let (_, values) = slice?;
            let values = self.scale_rows(values);
            let squares = read((values.clone() * values).sum_dim(0))?;
            norms.extend(squares.into_iter().map(f64::from));
        }
        Ok(norms)
    }

    /// Whether so many numbers of gathered columns may be kept: a small part of G, or little in
    /// absolute terms; of a matrix in a file, what the memory bound leaves. What is larger is read
    /// each time.
    pub(crate) fn may_keep(&self, numbers: usize) -> bool {
        match self.memory_bound {
            None => numbers <= (self.samples * self.parameters / 8).max(RESIDENT),
            Some(bound) => numbers.saturating_mul(size_of::<f32>()) <= bound / 2,
        }
    }

    /// The columns at `indices` (ascending), in F32, a chunk at a time: `[n, columns]` each, with
    /// its first position in `indices`.
    pub(crate) fn chunks<'a>(
        &'a self,
        indices: &'a [usize],
    ) -> impl Iterator<Item = Result<(usize, Tensor<2>), PruneError>> + 'a {
        let width = self.chunk_width();
        self.blocks.iter().flat_map(move |block| {
            let from = indices.partition_point(|index| *index < block.start);
            let to = indices.partition_point(|index| *index < block.end());
            let mut values = None;
            (from..to).step_by(width).map(move |first| {
                let values = match &values {
                    Some(values) => values,
                    None => values.insert(block.values()?),
                };
                let chunk = &indices[first..to.min(first + width)];
                let chunk = select(values, block.start, chunk).cast(FloatDType::F32);
                Ok((first, self.scale_rows(chunk)))
            })
        })
    }

    /// Consecutive columns as one tensor `[n, columns]` in F32.
    pub(crate) fn range(&self, columns: Range<usize>) -> Result<Tensor<2>, PruneError> {
        let parts = self.blocks.iter().filter_map(|block| {
            let (start, end) = (columns.start.max(block.start), columns.end.min(block.end()));
            (start < end).then(|| {
                let local = start - block.start..end - block.start;
                Ok(block.part(0..self.samples, local)?.cast(FloatDType::F32))
            })
        });
        let columns = joined(parts.collect::<Result<_, PruneError>>()?);
        Ok(self.scale_rows(columns))
    }

    /// The columns at `indices` (ascending) as one tensor `[n, columns]` in F32.
    pub(crate) fn columns(&self, indices: &[usize]) -> Result<Tensor<2>, PruneError> {
        let chunks = self.chunks(indices);
        let parts = chunks.map(|chunk| Ok(chunk?.1));
        Ok(joined(parts.collect::<Result<_, PruneError>>()?))
    }

    /// The same gradients, each divided by its length to the power of `exponent`, times one
    /// constant that keeps the sum of their squared lengths. Zero rows stay zero.
    pub(crate) fn tempered(&self, exponent: f64) -> Result<Self, PruneError> {
        let width = self.chunk_width();
        let mut largest = vec![0.0_f32; self.samples];
        for slice in self.slices(width) {
            let (_, values) = slice?;
            let most = read(reductions::max_dim(values.abs(), 1))?;
            let pairs = largest.iter_mut().zip(most);
            pairs.for_each(|(largest, most)| *largest = largest.max(most));
        }
        // Powers of two that bring the largest gradient of each row near 1: squares of the rows of a
        // saturated loss are below the smallest F32, and other rows keep their digits.
        let exponents = largest.iter().map(|largest| match *largest > 0.0 {
            true => (f64::from(*largest).log2().floor() as i32).clamp(-126, 126),
            false => 0,
        });
        let exponents: Vec<i32> = exponents.collect();
        let up: Vec<f32> = exponents.iter().map(|e| 2.0_f64.powi(-e) as f32).collect();
        let mut norms = vec![0.0; self.samples];
        for slice in self.slices(width) {
            let (_, values) = slice?;
            let up = column(&up, &values.device());
            let values = values * up;
            let squares = read(reductions::sum_dim(values.clone() * values, 1))?;
            let pairs = norms.iter_mut().zip(squares);
            pairs.for_each(|(norm, square)| *norm += f64::from(square));
        }
        let pairs = norms.iter_mut().zip(&exponents);
        pairs.for_each(|(norm, e)| *norm *= 2.0_f64.powi(2 * e));
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
        let scale = |norm: &f64| (keep * factor(*norm)).min(MOST_SCALE) as f32;
        Ok(Self {
            scale: Some(norms.iter().map(scale).collect()),
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
        for chunk in self.chunks(&suspects) {
            let (first, columns) = chunk?;
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

    /// Columns that are gathered, widened or multiplied at once.
    fn chunk_width(&self) -> usize {
        let bytes = match in_host_memory(&self.device()) {
            true => HOST_CHUNK_BYTES,
            false => DEVICE_CHUNK_BYTES,
        };
        (bytes / (4 * self.samples)).max(1)
    }

    /// Columns that are multiplied at once: all of them, unless they must be widened first.
    fn width(&self) -> usize {
        match self.dtype {
            FloatDType::F32 => self.parameters,
            _ => self.chunk_width(),
        }
    }

    /// All columns in F32, at most `width` at a time, with the index of the first one.
    fn slices(
        &self,
        width: usize,
    ) -> impl Iterator<Item = Result<(usize, Tensor<2>), PruneError>> + '_ {
        self.blocks.iter().flat_map(move |block| {
            let mut values = None;
            (block.start..block.end()).step_by(width).map(move |first| {
                let values: &Tensor<2> = match &values {
                    Some(values) => values,
                    None => values.insert(block.values()?),
                };
                let end = block.end().min(first + width);
                let columns = first - block.start..end - block.start;
                let values = match columns.len() == block.width() {
                    true => values.clone(),
                    false => values.clone().slice([0..self.samples, columns]),
                };
                Ok((first, values.cast(FloatDType::F32)))
            })
        })
    }
}

/// Consecutive columns as one tensor.
fn joined(mut parts: Vec<Tensor<2>>) -> Tensor<2> {
    match parts.len() {
        1 => parts.remove(0),
        _ => Tensor::cat(parts, 1),
    }
}
