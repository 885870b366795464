//! Which matrices are faster as their nonzero numbers, measured on the inputs that they get.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rten::Value as Foreign;

use super::linear::{Linear, Matrix};
use super::value::Value;
use super::{Operation, Runner};
use crate::DeployError;
use crate::engine::report::{SparseLayer, SparseOutcome};

/// Turns of a measurement, and what it may take.
const TURNS: usize = 15;
const AT_MOST: Duration = Duration::from_millis(60);

impl Runner {
    /// Decides for each matrix of which half is zero, on these inputs, whether it is kept as its nonzero
    /// numbers; says what was measured, one entry for each weight, and which other weights have as many
    /// zeros.
    ///
    /// A weight that several products read is decided at the first of them.
    pub(crate) fn settle(&mut self, inputs: Vec<Foreign>) -> Result<Vec<SparseLayer>, DeployError> {
        let undecided = |step: &super::Step| {
            matches!(&step.operation, Operation::Linear(linear)
                if matches!(linear.weight, Matrix::Undecided(_)))
        };
        if !self.steps.iter().any(undecided) {
            return Ok(self.dense_zeros.clone());
        }
        match self.pool.take() {
            Some(pool) => {
                let settled = pool.install(|| self.measure(inputs));
                self.pool = Some(pool);
                settled
            }
            None => self.measure(inputs),
        }
    }

    fn measure(&mut self, inputs: Vec<Foreign>) -> Result<Vec<SparseLayer>, DeployError> {
        let mut slots = self.filled(inputs.into_iter().map(Value::of).collect());
        let mut found = self.dense_zeros.clone();
        let mut chosen: HashMap<String, Matrix> = HashMap::new();
        for step in &mut self.steps {
            let given = step.given(&mut slots)?;
            if let Operation::Linear(linear) = &mut step.operation
                && let (Matrix::Undecided(both), Some(x)) = (&linear.weight, given.first())
            {
                let matrix = match chosen.get(&both.name) {
                    Some(known) => known.clone(),
                    None => {
                        let layer = linear.compare(x)?;
                        let matrix = match layer.outcome {
                            SparseOutcome::LeftOut { .. } => Matrix::Sparse(both.sparse.clone()),
                            _ => Matrix::Floats(both.dense.clone()),
                        };
                        // The plan counted all numbers.
                        self.resident_bytes -= both.dense.bytes();
                        self.resident_bytes += matrix.bytes();
                        chosen.insert(both.name.clone(), matrix.clone());
                        found.push(layer);
                        matrix
                    }
                };
                linear.weight = matrix;
            }
            let made = step.operation.run(given)?;
            step.keep(made, &mut slots);
        }
        Ok(found)
    }
}

impl Linear {
    /// The shortest run of each form of a weight, in turns.
    fn compare(&self, x: &Value) -> Result<SparseLayer, DeployError> {
        let Matrix::Undecided(both) = &self.weight else {
            return Err(super::failed("a weight was decided before"));
        };
        let forms = [
            Matrix::Sparse(both.sparse.clone()),
            Matrix::Floats(both.dense.clone()),
        ];
        let mut shortest = [Duration::MAX; 2];
        let begin = Instant::now();
        for turn in 0..TURNS {
            if turn >= 3 && begin.elapsed() > AT_MOST {
                break;
            }
            for (form, shortest) in forms.iter().zip(&mut shortest) {
                let start = Instant::now();
                self.times(form, x.clone())?;
                *shortest = start.elapsed().min(*shortest);
            }
        }
        let [sparse, dense] = shortest;
        let [rows, columns] = both.sparse.shape();
        Ok(SparseLayer {
            path: both.path.clone(),
            nonzeros: both.sparse.kept(),
            weights: rows * columns,
            // As fast, it takes fewer bytes.
            outcome: match sparse <= dense && both.sparse.bytes() < both.dense.bytes() {
                true => SparseOutcome::LeftOut { sparse, dense },
                false => SparseOutcome::Multiplied { sparse, dense },
            },
        })
    }
}
