//! Constants and attributes of a model's nodes as numbers.

use std::collections::HashMap;

use burn_lean_kernels::Geometry;

use crate::onnx::Attribute;
use crate::{ElementType, Initializer, OnnxModel, OnnxNode};

/// The constants of a model by name.
pub(super) struct Constants<'a>(HashMap<&'a str, &'a Initializer>);

impl<'a> Constants<'a> {
    pub(super) fn of(model: &'a OnnxModel) -> Self {
        let all = model.initializers.iter();
        Self(all.map(|one| (one.name.as_str(), one)).collect())
    }

    pub(super) fn get(&self, name: &str) -> Option<&'a Initializer> {
        self.0.get(name).copied()
    }

    pub(super) fn floats(&self, name: &str) -> Option<Vec<f32>> {
        let constant = self.get(name)?;
        let (numbers, _) = constant.bytes.as_chunks::<4>();
        (constant.element == ElementType::F32).then(|| {
            numbers
                .iter()
                .map(|bytes| f32::from_le_bytes(*bytes))
                .collect()
        })
    }

    /// A constant of one number.
    pub(super) fn number(&self, name: &str) -> Option<f32> {
        match self.floats(name)?[..] {
            [number] => Some(number),
            _ => None,
        }
    }

    pub(super) fn ints(&self, name: &str) -> Option<Vec<i64>> {
        let constant = self.get(name)?;
        let (numbers, _) = constant.bytes.as_chunks::<8>();
        (constant.element == ElementType::I64).then(|| {
            numbers
                .iter()
                .map(|bytes| i64::from_le_bytes(*bytes))
                .collect()
        })
    }

    /// The number in a constant that is a list of one.
    pub(super) fn list_of_one(&self, name: &str) -> Option<i32> {
        let is_list = self.get(name)?.shape == [1];
        match self.ints(name)?[..] {
            [number] if is_list => i32::try_from(number).ok(),
            _ => None,
        }
    }

    pub(super) fn bytes(&self, name: &str) -> Option<Vec<i8>> {
        let constant = self.get(name)?;
        (constant.element == ElementType::I8)
            .then(|| constant.bytes.iter().map(|byte| *byte as i8).collect())
    }
}

pub(super) fn int(node: &OnnxNode, name: &str) -> Option<i64> {
    node.attributes
        .iter()
        .find_map(|attribute| match attribute {
            Attribute::Int(of, value) if *of == name => Some(*value),
            _ => None,
        })
}

pub(super) fn float(node: &OnnxNode, name: &str) -> Option<f32> {
    node.attributes
        .iter()
        .find_map(|attribute| match attribute {
            Attribute::Float(of, value) if *of == name => Some(*value),
            _ => None,
        })
}

fn ints(node: &OnnxNode, name: &str) -> Option<Vec<i64>> {
    node.attributes
        .iter()
        .find_map(|attribute| match attribute {
            Attribute::Ints(of, values) if *of == name => Some(values.clone()),
            _ => None,
        })
}

/// As [`ints`], of numbers that are not negative.
pub(super) fn sizes(node: &OnnxNode, name: &str) -> Option<Vec<usize>> {
    let values = ints(node, name)?;
    values
        .into_iter()
        .map(|x| usize::try_from(x).ok())
        .collect()
}

/// The geometry of a window of two axes; one alone is the second.
pub(super) fn geometry(node: &OnnxNode, kernel: &[usize]) -> Option<Geometry> {
    let two = |values: &[usize], none: usize| match *values {
        [width] => Some([none, width]),
        [height, width] => Some([height, width]),
        _ => None,
    };
    let or_ones = |name: &str| match ints(node, name) {
        Some(_) => sizes(node, name),
        None => Some(vec![1; kernel.len()]),
    };
    let pads = match ints(node, "pads") {
        Some(_) => sizes(node, "pads")?,
        None => vec![0; 2 * kernel.len()],
    };
    let (before, after) = pads.split_at_checked(kernel.len())?;
    Some(Geometry {
        kernel: two(kernel, 1)?,
        stride: two(&or_ones("strides")?, 1)?,
        padding: [two(before, 0)?, two(after, 0)?],
        dilation: two(&or_ones("dilations")?, 1)?,
    })
}
