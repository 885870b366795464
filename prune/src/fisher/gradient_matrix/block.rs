//! Consecutive columns of G: in memory, or in a file.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};

use super::file::{NumberFile, Rows};
use crate::error::PruneError;
use crate::host::{self, read};

/// Consecutive columns of G.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    /// Index of the first column.
    pub(crate) start: usize,
    columns: Columns,
}

#[derive(Debug, Clone)]
enum Columns {
    /// `[n, columns]`
    InMemory(Box<Tensor<2>>),
    InFile {
        file: Arc<NumberFile>,
        matrix: Rows,
        samples: usize,
        /// Where they are used.
        device: Device,
    },
}

impl Block {
    pub(crate) fn in_memory(start: usize, values: Tensor<2>) -> Self {
        let columns = Columns::InMemory(Box::new(values));
        Self { start, columns }
    }

    /// The columns `[samples, width]` that a file holds behind those of `start`.
    pub(crate) fn in_file(
        start: usize,
        file: Arc<NumberFile>,
        [samples, width]: [usize; 2],
        device: Device,
    ) -> Self {
        let at = samples as u64 * start as u64;
        let matrix = Rows { at, width };
        let columns = Columns::InFile {
            file,
            matrix,
            samples,
            device,
        };
        Self { start, columns }
    }

    pub(crate) fn width(&self) -> usize {
        match &self.columns {
            Columns::InMemory(values) => values.dims()[1],
            Columns::InFile { matrix, .. } => matrix.width,
        }
    }

    /// The folder of its file, if it is in one.
    pub(crate) fn folder(&self) -> Option<&Path> {
        match &self.columns {
            Columns::InMemory(_) => None,
            Columns::InFile { file, .. } => Some(file.folder()),
        }
    }

    pub(crate) fn end(&self) -> usize {
        self.start + self.width()
    }

    pub(crate) fn device(&self) -> Device {
        match &self.columns {
            Columns::InMemory(values) => values.device(),
            Columns::InFile { device, .. } => device.clone(),
        }
    }

    /// All of it, `[n, columns]`: as it is stored, or in F32 from a file.
    pub(crate) fn values(&self) -> Result<Tensor<2>, PruneError> {
        match &self.columns {
            Columns::InMemory(values) => Ok(Tensor::clone(values)),
            Columns::InFile { samples, .. } => self.part(0..*samples, 0..self.width()),
        }
    }

    /// Some rows of some columns, which count from the first of the block.
    pub(crate) fn part(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Result<Tensor<2>, PruneError> {
        match &self.columns {
            Columns::InMemory(values) => Ok(Tensor::clone(values).slice([rows, columns])),
            Columns::InFile {
                file,
                matrix,
                device,
                ..
            } => {
                let shape = [rows.len(), columns.len()];
                let numbers = TensorData::new(file.read(*matrix, rows, columns)?, shape);
                Ok(Tensor::from_data(numbers, (device, DType::F32)))
            }
        }
    }

    /// Writes some rows of some columns, which count from the first of the block.
    pub(crate) fn write(
        &mut self,
        rows: Range<usize>,
        columns: Range<usize>,
        part: Tensor<2>,
        dtype: FloatDType,
    ) -> Result<(), PruneError> {
        match &mut self.columns {
            // Written in place: nobody else holds the block while it is out.
            Columns::InMemory(values) => {
                values.inplace(|values| values.slice_assign([rows, columns], part.cast(dtype)));
                Ok(())
            }
            Columns::InFile { file, matrix, .. } => {
                file.write(*matrix, rows, columns, &read(part)?)
            }
        }
    }
}

/// The columns of a block at these indices of G, where the block begins with the column `start`.
pub(crate) fn select(values: &Tensor<2>, start: usize, indices: &[usize]) -> Tensor<2> {
    match indices.len() == values.dims()[1] {
        true => values.clone(),
        false => host::select(values.clone(), 1, indices.iter().map(|at| at - start)),
    }
}
