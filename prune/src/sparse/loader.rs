//! Tensors into the parameters of a model.

use std::collections::HashMap;
use std::fmt;

use burn::backend::ops::QTensorOps;
use burn::backend::{Backend, DTypeUsage, Dispatch};
use burn::module::{Param, ParamId};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_lean_reparam::{PathMapper, PathVisitor, Trail, catch_quietly, map_kinds};

/// What the numbers of a parameter are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Float,
    Int,
    Bool,
}

impl Kind {
    pub(super) fn of(dtype: DType) -> Self {
        match dtype {
            DType::Bool(_) => Self::Bool,
            dtype if dtype.is_float() || matches!(dtype, DType::QFloat(_)) => Self::Float,
            _ => Self::Int,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Float => "floating-point numbers",
            Self::Int => "integers",
            Self::Bool => "flags",
        })
    }
}

/// Whether a device can keep numbers of a record.
pub(super) fn can_hold(device: &Device, data: &TensorData) -> bool {
    match data.dtype() {
        // Converted to what the device has.
        DType::Bool(_) => true,
        dtype @ DType::QFloat(_) => {
            // Burn's CPU backends say so of codes in words, and panic at some of them; its GPU backends
            // panic at the question where codes lie as CPUs have them.
            let data = data.clone();
            let keeps = || {
                let usage = Dispatch::dtype_usage(device.as_dispatch(), dtype);
                let says_so = usage.contains(DTypeUsage::Storage) || device.supports_dtype(dtype);
                says_so.then(|| Dispatch::q_from_data(data, device.as_dispatch()))
            };
            matches!(catch_quietly(keeps), Ok(Some(_)))
        }
        dtype => device.supports_dtype(dtype),
    }
}

/// A parameter of a model, as a record must have it.
pub(super) struct Place {
    pub(super) shape: Vec<usize>,
    pub(super) device: Device,
    pub(super) kind: Kind,
}

/// What each parameter of a model must look like in a record, and where it goes.
#[derive(Default)]
pub(super) struct Places {
    pub(super) shapes: HashMap<String, Vec<usize>>,
    pub(super) remaining: HashMap<String, Place>,
}

impl Places {
    fn insert(&mut self, at: &Trail, shape: Vec<usize>, device: Device, kind: Kind) {
        let path = at.path();
        self.shapes.insert(path.clone(), shape.clone());
        let place = Place {
            shape,
            device,
            kind,
        };
        self.remaining.insert(path, place);
    }
}

impl PathVisitor for Places {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        let saved = param.transform_for_save().val();
        self.insert(at, saved.shape().to_vec(), saved.device(), Kind::Float);
    }

    fn int<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D, Int>>) {
        let saved = param.transform_for_save().val();
        self.insert(at, saved.shape().to_vec(), saved.device(), Kind::Int);
    }

    fn bool<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D, Bool>>) {
        let saved = param.transform_for_save().val();
        self.insert(at, saved.shape().to_vec(), saved.device(), Kind::Bool);
    }
}

/// The tensors of a record, by path.
pub(super) struct Loader(pub(super) HashMap<String, (ParamId, TensorData)>);

impl PathMapper for Loader {
    map_kinds!(float, int: |self, at, param| match self.0.remove(&at.path()) {
        Some((id, data)) => {
            let dtype = data.dtype();
            let tensor = Tensor::from_data(data, (&param.lazy_device(), dtype));
            param.transform_for_load(tensor, id)
        }
        None => param,
    });

    map_kinds!(bool: |self, at, param| match self.0.remove(&at.path()) {
        Some((id, data)) => {
            let tensor = Tensor::from_data(data, &param.lazy_device());
            param.transform_for_load(tensor, id)
        }
        None => param,
    });
}
