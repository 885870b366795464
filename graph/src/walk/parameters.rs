//! The parameters of a walk: what they are, and what is put in their place.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Tensor;

use super::product::{Product, fits};
use super::{Pass, Walk};
use crate::{GraphError, Parameter, Tensors};

impl<O: Tensors> Walk<O> {
    /// The weight of a product, `[outputs, inputs]`.
    ///
    /// # Errors
    ///
    /// [`GraphError::Parameter`] where the graph has no such parameter.
    pub fn weight(&self, product: &Product, pass: Pass) -> Result<Tensor<2>, GraphError> {
        Ok(product.matrix(self.value_of(&product.parameter.path, pass)?))
    }

    /// Puts `matrix`, `[outputs, inputs]`, in the place of the weight of a product.
    ///
    /// # Errors
    ///
    /// [`GraphError::Replacement`] where it has another shape or dtype.
    pub fn replace_weight(
        &mut self,
        product: &Product,
        matrix: Tensor<2>,
    ) -> Result<(), GraphError> {
        let expected = [product.outputs, product.inputs];
        if matrix.dims() != expected {
            return Err(GraphError::Replacement {
                path: product.parameter.path.clone(),
                expected: format!("a weight of [outputs, inputs] {expected:?}"),
                found: format!("{:?}", matrix.dims()),
            });
        }
        let index = self.index(&product.parameter.path)?;
        self.put_checked(index, product.value(matrix))
    }

    /// Puts another value in the place of a parameter, for the next operation and all that follow, and
    /// for what is computed from it alone. Wherever else the same parameter is read, too.
    ///
    /// # Errors
    ///
    /// [`GraphError::Parameter`] where the graph does not read it, [`GraphError::Replacement`] where
    /// it has another shape or dtype.
    pub fn replace<const D: usize>(
        &mut self,
        path: &str,
        value: Tensor<D>,
    ) -> Result<(), GraphError> {
        let index = self.index(path)?;
        self.put_checked(index, value.into_dispatch())
    }

    /// Puts a value that has the shape and the dtype of the parameter's own.
    fn put_checked(&mut self, index: usize, value: DispatchTensor) -> Result<(), GraphError> {
        let parameter = &self.graph().parameters()[index];
        let dtype = self.weights.original[index].dtype();
        if !fits(&value, parameter) || value.dtype() != dtype {
            return Err(GraphError::Replacement {
                path: parameter.path.clone(),
                expected: format!("of shape {:?} in {dtype:?}", parameter.shape),
                found: format!("{:?} in {:?}", value.shape().to_vec(), value.dtype()),
            });
        }
        self.put(index, value);
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
        let value = self.value_of(path, pass)?;
        if value.shape().num_dims() != D {
            return Err(GraphError::Parameter { path: path.into() });
        }
        Ok(Tensor::from_dispatch(value))
    }

    fn value_of(&self, path: &str, pass: Pass) -> Result<DispatchTensor, GraphError> {
        let index = self.index(path)?;
        let weights = &self.weights;
        let replaced = weights
            .replaced
            .get(&index)
            .filter(|_| pass == Pass::Replaced);
        Ok(replaced.unwrap_or(&weights.original[index]).clone())
    }

    fn index(&self, path: &str) -> Result<usize, GraphError> {
        let named = |one: &Parameter| one.path == path;
        let index = self.graph().parameters().iter().position(named);
        index.ok_or_else(|| GraphError::Parameter { path: path.into() })
    }
}
