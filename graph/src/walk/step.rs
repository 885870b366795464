//! One operation of a walk, with the operands of all batches.

use std::collections::HashSet;
use std::ops::Deref;

use burn::backend::ir::TensorId;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, TensorMetadata};
use burn::tensor::{Shape, Tensor};

use super::lane::Lane;
use super::product::{Product, product};
use super::rows::rows;
use super::{Pass, Walk};
use crate::{GraphError, Node, Tensors};

/// An operation that is about to be computed.
///
/// It shows what its [`Walk`] does, weights and parameters say, but does not take it further: this would be another
/// operation then.
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

impl<O> Deref for Step<'_, O> {
    type Target = Walk<O>;

    fn deref(&self) -> &Walk<O> {
        self.walk
    }
}

impl<O: Tensors> Step<'_, O> {
    /// The operation.
    pub fn node(&self) -> Node<'_> {
        self.walk.graph().node(self.node)
    }

    /// The operation as a product with a weight, if it is one.
    pub fn product(&self) -> Option<Product> {
        product(&self.walk.scripts[0], self.node)
    }

    /// Whether each row of a product is that of the same thing in both passes, in a batch: of one token, say, or one
    /// place of an image.
    ///
    /// It is not where the order of rows, or which of them take part, follows from values that differ and came out
    /// otherwise, as by a sort or top-k and a `select`. Rows that a product with a mask moves are not noticed.
    pub fn rows_correspond(&self, product: &Product, batch: usize) -> bool {
        let ranked = self.walk.places[batch].of(product.input.id);
        let features = product.features_axis(ranked.len());
        let mut rows = ranked.iter().enumerate();
        !rows.any(|(axis, is_ranked)| *is_ranked && Some(axis) != features)
    }

    /// Whether each place of a tensor is that of the same thing in both passes, as of
    /// [`rows_correspond`](Self::rows_correspond).
    pub fn places_correspond(&self, batch: usize, id: TensorId) -> bool {
        self.walk.places[batch].of(id).is_empty()
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

    /// The value of a float tensor that is alive here, whatever reads it.
    ///
    /// # Errors
    ///
    /// [`GraphError::NotAlive`] where it is not alive, [`GraphError::Operand`] where it is of another rank.
    pub fn tensor<const D: usize>(
        &mut self,
        batch: usize,
        id: TensorId,
        pass: Pass,
    ) -> Result<Tensor<D>, GraphError> {
        self.float(batch, Some(id), 0, pass)
    }

    /// The last dimension of a float tensor that is alive here as columns, all others as rows.
    ///
    /// # Errors
    ///
    /// As [`tensor`](Self::tensor).
    pub fn tensor_rows(
        &mut self,
        batch: usize,
        id: TensorId,
        pass: Pass,
    ) -> Result<Tensor<2>, GraphError> {
        let value = self.walk.value(batch, id, pass)?;
        let shape = value.shape();
        let columns = shape.to_vec().last().copied().unwrap_or(1);
        let rows = shape.num_elements() / columns.max(1);
        let value = Dispatch::float_reshape(value, Shape::new([rows, columns]));
        Ok(Tensor::from_dispatch(value))
    }

    /// Calls `each` with the rows `X` of a product in a batch, at most `chunk` of them at a time,
    /// each of shape `[rows, inputs]`; of a convolution, those of one group, and whole examples.
    ///
    /// # Errors
    ///
    /// [`GraphError::Spill`] where they cannot be read back, [`GraphError::NotAlive`] for a product of another
    /// operation.
    pub fn rows(
        &mut self,
        product: &Product,
        batch: usize,
        pass: Pass,
        group: usize,
        chunk: usize,
        mut each: impl FnMut(Tensor<2>),
    ) -> Result<(), GraphError> {
        let value = self.walk.value(batch, product.input.id, pass)?;
        let product = self.walk.of_batch(product, batch);
        rows(&product, value, group, chunk, &mut each);
        Ok(())
    }

    /// [`rows`](Self::rows) of one group after the other, with its number: what arrives is read once, which
    /// counts where it is in a file.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn rows_of_groups(
        &mut self,
        product: &Product,
        batch: usize,
        pass: Pass,
        chunk: usize,
        mut each: impl FnMut(usize, Tensor<2>),
    ) -> Result<(), GraphError> {
        let value = self.walk.value(batch, product.input.id, pass)?;
        let product = self.walk.of_batch(product, batch);
        for group in 0..product.groups {
            rows(&product, value.clone(), group, chunk, &mut |x| {
                each(group, x)
            });
        }
        Ok(())
    }

    /// [`Walk::replace_weight`], with this operation as the first that sees it.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn replace_weight(
        &mut self,
        product: &Product,
        matrix: Tensor<2>,
    ) -> Result<(), GraphError> {
        self.walk.replace_weight(product, matrix)
    }

    /// [`Walk::replace`], with this operation as the first that sees it.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn replace<const D: usize>(
        &mut self,
        path: &str,
        value: Tensor<D>,
    ) -> Result<(), GraphError> {
        self.walk.replace(path, value)
    }
}
