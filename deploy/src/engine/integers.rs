//! Whether the constants of a model fit the integers that the engine has.

use std::collections::HashSet;

use crate::onnx::Attribute;
use crate::{DeployError, ElementType, OnnxModel};

/// The engine computes integers in 32 bits: an error for a constant that has more.
pub(super) fn check_integers(model: &OnnxModel) -> Result<(), DeployError> {
    // Where all that follows is meant, slices have bounds beyond any size.
    let mut bounds = HashSet::new();
    let mut others = HashSet::new();
    for node in &model.nodes {
        for (place, name) in node.inputs.iter().enumerate() {
            match node.operator == "Slice" && place > 0 {
                true => bounds.insert(name.as_str()),
                false => others.insert(name.as_str()),
            };
        }
        for attribute in &node.attributes {
            if let Attribute::Element(_, element, bytes) = attribute {
                check(&node.name, *element, bytes)?;
            }
        }
    }
    for constant in &model.initializers {
        let name = constant.name.as_str();
        if others.contains(name) || !bounds.contains(name) {
            check(name, constant.element, &constant.bytes)?;
        }
    }
    Ok(())
}

fn check(name: &str, element: ElementType, bytes: &[u8]) -> Result<(), DeployError> {
    if element != ElementType::I64 {
        return Ok(());
    }
    let (numbers, _) = bytes.as_chunks::<8>();
    let mut numbers = numbers.iter().map(|bytes| i64::from_le_bytes(*bytes));
    match numbers.find(|number| i32::try_from(*number).is_err()) {
        None => Ok(()),
        Some(number) => Err(DeployError::Load {
            reason: format!(
                "`{name}` is {number}, but it computes integers in 32 bits: make the number smaller, or \
                 compile with `Backend::Burn`"
            ),
        }),
    }
}
