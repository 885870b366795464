//! One operation of a walk, with the operands of all batches.

use std::collections::HashSet;

use burn::backend::TensorMetadata;
use burn::backend::ir::TensorId;
use burn::tensor::Tensor;

use super::lane::Lane;
use super::product::{Product, fits, product};
use super::rows::rows;
use super::{Pass, Walk};
use crate::{GraphError, Node, Parameter, Tensors};

/// An operation that is about to be computed.
#[derive(Debug)]
pub struct Step<'a, O> {
    pub(super) walk: &'a mut Walk<O>,
    pub(super) node: usize,
}

/// A place of a walk, with what was alive there: [`Walk::mark`].
#[derive(Debug, Clone)]
pub struct Mark {
    pub(super) lanes: Vec<(usize, Lane)>,
    pub(super) differing: HashSet<TensorId>,
    pub(super) position: usize,
}

impl<O: Tensors> Step<'_, O> {
    /// The operation.
    pub fn node(&self) -> Node<'_> {
        self.walk.graph().node(self.node)
    }

    /// The number of batches.
    pub fn batches(&self) -> usize {
        self.walk.batches()
    }

    /// The operation as a product with a weight, if it is one.
    pub fn product(&self) -> Option<Product> {
        product(&self.walk.scripts[0], self.node)
    }

    /// Float operand `index` of the operation, in the order of its representation.
    ///
    /// # Errors
    ///
    /// [`GraphError::Operand`] where there is none of this rank.
    pub fn operand<const D: usize>(
        &mut self,
        batch: usize,
        index: usize,
        pass: Pass,
    ) -> Result<Tensor<D>, GraphError> {
        let id = self
            .node()
            .operation()
            .inputs()
            .nth(index)
            .map(|one| one.id);
        self.float(batch, id, index, pass)
    }

    /// Float result `index` of the operation, which is computed for that: parameters that are
    /// replaced afterwards have no effect on it.
    ///
    /// # Errors
    ///
    /// As [`operand`](Self::operand) and [`Walk::advance`].
    pub fn result<const D: usize>(
        &mut self,
        batch: usize,
        index: usize,
        pass: Pass,
    ) -> Result<Tensor<D>, GraphError> {
        if self.walk.position == self.node {
            self.walk.compute_until(self.node + 1)?;
            self.walk.shown = false;
        }
        let id = self
            .node()
            .operation()
            .outputs()
            .nth(index)
            .map(|one| one.id);
        self.float(batch, id, index, pass)
    }

    fn float<const D: usize>(
        &mut self,
        batch: usize,
        id: Option<TensorId>,
        index: usize,
        pass: Pass,
    ) -> Result<Tensor<D>, GraphError> {
        let operation = self.node().name();
        let missing = |why: String| GraphError::Operand {
            operation,
            index,
            why,
        };
        let id = id.ok_or_else(|| missing("it has fewer".into()))?;
        let value = self.walk.value(batch, id, pass)?;
        let (rank, dtype) = (value.shape().num_dims(), value.dtype());
        if rank != D || !dtype.is_float() {
            return Err(missing(format!(
                "it is {dtype:?} of rank {rank}, not a float of rank {D}"
            )));
        }
        Ok(Tensor::from_dispatch(value))
    }

    /// Calls `each` with the rows `X` of a product in a batch, at most `chunk` of them at a time,
    /// each of shape `[rows, inputs]`; of a convolution, those of one group, and whole examples.
    ///
    /// # Errors
    ///
    /// [`GraphError::Spill`] where they cannot be read back.
    pub fn rows(
        &mut self,
        product: &Product,
        batch: usize,
        pass: Pass,
        group: usize,
        chunk: usize,
        mut each: impl FnMut(Tensor<2>),
    ) -> Result<(), GraphError> {
        // The geometry of the batch: shapes may differ between batches, names do not.
        let value = self.walk.value(batch, product.input.id, pass)?;
        rows(product, value, group, chunk, &mut each);
        Ok(())
    }

    /// The weight of a product, `[outputs, inputs]`.
    ///
    /// # Errors
    ///
    /// [`GraphError::Parameter`] where the graph has no such parameter.
    pub fn weight(&mut self, product: &Product, pass: Pass) -> Result<Tensor<2>, GraphError> {
        let index = self.index(&product.parameter.path)?;
        let weights = &self.walk.weights;
        let replaced = weights
            .replaced
            .get(&index)
            .filter(|_| pass == Pass::Replaced);
        Ok(product.matrix(replaced.unwrap_or(&weights.original[index]).clone()))
    }

    /// Puts `matrix`, `[outputs, inputs]`, in the place of the weight of a product.
    ///
    /// # Errors
    ///
    /// [`GraphError::Mismatch`] where it has another shape.
    pub fn replace_weight(
        &mut self,
        product: &Product,
        matrix: Tensor<2>,
    ) -> Result<(), GraphError> {
        let expected = [product.outputs, product.inputs];
        if matrix.dims() != expected {
            return Err(GraphError::Mismatch {
                recorded: format!("`{}` as {expected:?}", product.parameter.path),
                found: format!("{:?}", matrix.dims()),
            });
        }
        let index = self.index(&product.parameter.path)?;
        self.walk.put(index, product.value(matrix));
        Ok(())
    }

    /// Puts another value in the place of a parameter, for this operation and all that follow, and
    /// for what is computed from it alone. Wherever else the same parameter is read, too.
    ///
    /// # Errors
    ///
    /// [`GraphError::Parameter`] where the graph does not read it, [`GraphError::Mismatch`] where
    /// it has another shape.
    pub fn replace<const D: usize>(
        &mut self,
        path: &str,
        value: Tensor<D>,
    ) -> Result<(), GraphError> {
        let index = self.index(path)?;
        let parameter = &self.walk.graph().parameters()[index];
        let value = value.into_dispatch();
        if !fits(&value, parameter) {
            return Err(GraphError::Mismatch {
                recorded: format!("`{path}` of shape {:?}", parameter.shape),
                found: format!("{:?}", value.shape().to_vec()),
            });
        }
        self.walk.put(index, value);
        Ok(())
    }

    /// The value of a parameter.
    ///
    /// # Errors
    ///
    /// [`GraphError::Parameter`] where the graph does not read it, or it has another rank.
    pub fn parameter<const D: usize>(
        &self,
        path: &str,
        pass: Pass,
    ) -> Result<Tensor<D>, GraphError> {
        let index = self.index(path)?;
        let weights = &self.walk.weights;
        let replaced = weights
            .replaced
            .get(&index)
            .filter(|_| pass == Pass::Replaced);
        let value = replaced.unwrap_or(&weights.original[index]).clone();
        if value.shape().num_dims() != D {
            return Err(GraphError::Parameter { path: path.into() });
        }
        Ok(Tensor::from_dispatch(value))
    }

    fn index(&self, path: &str) -> Result<usize, GraphError> {
        let named = |one: &Parameter| one.path == path;
        let index = self.walk.graph().parameters().iter().position(named);
        index.ok_or_else(|| GraphError::Parameter { path: path.into() })
    }
}
