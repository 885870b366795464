//! Where the rows of a collection go: into the gradient matrix, or into a sketch of it.

use burn::tensor::Device;

use crate::FisherConfig;
use crate::error::PruneError;
use crate::fisher::gradient_matrix::GradientMatrix;
use crate::fisher::sketch::{Sketch, SketchReport};

pub(crate) enum Sink {
    Matrix(GradientMatrix),
    Sketch {
        sketch: Box<Sketch>,
        /// Rows that are not in it yet.
        new: GradientMatrix,
    },
}

impl Sink {
    /// For n rows of so many columns, on `store` unless they are to be in a file.
    pub(crate) fn new(
        config: &FisherConfig,
        parameters: usize,
        store: &Device,
    ) -> Result<Self, PruneError> {
        let (samples, dtype) = (config.samples, config.dtype);
        if let Some(sketch) = config.sketch {
            let rows = config.pass_rows(parameters);
            return Ok(Self::Sketch {
                sketch: Box::new(Sketch::new(sketch, parameters, store)?),
                new: GradientMatrix::with_capacity(rows, parameters, dtype, store)?,
            });
        }
        let matrix = match config.folder(parameters) {
            Some(folder) => {
                let bound = config.memory_bound;
                GradientMatrix::in_file(samples, parameters, dtype, store, folder, bound)
            }
            None => GradientMatrix::with_capacity(samples, parameters, dtype, store),
        };
        Ok(Self::Matrix(matrix?))
    }

    /// What the next rows are written to, and the first of them there.
    pub(crate) fn next(&mut self) -> (&mut GradientMatrix, usize) {
        match self {
            Self::Matrix(matrix) => {
                let first = matrix.filled();
                (matrix, first)
            }
            Self::Sketch { new, .. } => (new, 0),
        }
    }

    /// Takes the `count` rows that were written.
    pub(crate) fn advance(&mut self, count: usize) -> Result<(), PruneError> {
        match self {
            Self::Matrix(matrix) => {
                matrix.advance(count);
                Ok(())
            }
            Self::Sketch { sketch, new } => {
                sketch.add(new, count)?;
                // What nobody puts stays zero.
                new.clear(0..count)
            }
        }
    }

    /// Fisher samples that it has.
    pub(crate) fn filled(&self) -> usize {
        match self {
            Self::Matrix(matrix) => matrix.filled(),
            Self::Sketch { sketch, .. } => sketch.samples(),
        }
    }

    /// Forgets everything.
    pub(crate) fn restart(&mut self) -> Result<(), PruneError> {
        match self {
            Self::Matrix(matrix) => matrix.restart(),
            Self::Sketch { sketch, .. } => sketch.restart(),
        }
    }

    pub(crate) fn finish(self) -> Result<(GradientMatrix, Option<SketchReport>), PruneError> {
        match self {
            Self::Matrix(matrix) => Ok((matrix, None)),
            Self::Sketch { sketch, .. } => {
                let (rows, report) = sketch.finish()?;
                Ok((rows, Some(report)))
            }
        }
    }
}
