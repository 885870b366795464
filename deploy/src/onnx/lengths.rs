//! Whether the lengths in an ONNX file fit into it.
//!
//! A reader that makes room for as many bytes as a damaged length says ends the process; so the fields
//! are walked through first, as far as their messages are known here.

use std::collections::HashSet;

/// Messages within messages, at most: a graph in an attribute of a node of a graph, and so on.
const DEEPEST: usize = 64;

/// The messages of ONNX's schema that have others, or texts, in them.
#[derive(Clone, Copy)]
enum Kind {
    Model,
    Graph,
    Node,
    Attribute,
    Tensor,
    Value,
    Type,
    TensorType,
    SequenceType,
    Shape,
    Leaf,
}

impl Kind {
    /// What a field of it is; `None` for numbers and bytes.
    fn of(self, field: u64) -> Option<Self> {
        Some(match (self, field) {
            (Self::Model, 7) | (Self::Attribute, 6) => Self::Graph,
            (Self::Graph, 1) => Self::Node,
            (Self::Graph, 5) | (Self::Attribute, 5) => Self::Tensor,
            (Self::Graph, 11..=13) => Self::Value,
            (Self::Node, 5) => Self::Attribute,
            (Self::Value, 2) | (Self::SequenceType, 1) => Self::Type,
            (Self::Type, 1) => Self::TensorType,
            (Self::Type, 4) => Self::SequenceType,
            (Self::TensorType, 2) => Self::Shape,
            (Self::Model, 8 | 14) | (Self::Tensor, 13) | (Self::Shape, 1) => Self::Leaf,
            _ => return None,
        })
    }
}

/// The operators of the file.
///
/// # Errors
///
/// What is wrong, for a message.
pub(crate) fn check(bytes: &[u8]) -> Result<HashSet<&[u8]>, String> {
    let mut operators = HashSet::new();
    fields(bytes, Kind::Model, 0, &mut operators)?;
    Ok(operators)
}

fn fields<'a>(
    mut bytes: &'a [u8],
    kind: Kind,
    depth: usize,
    operators: &mut HashSet<&'a [u8]>,
) -> Result<(), String> {
    if depth > DEEPEST {
        return Err(format!(
            "it has more than {DEEPEST} graphs within one another"
        ));
    }
    while !bytes.is_empty() {
        let key = varint(&mut bytes)?;
        let length = match key & 7 {
            0 => {
                varint(&mut bytes)?;
                continue;
            }
            1 => 8,
            2 => varint(&mut bytes)?,
            5 => 4,
            other => return Err(format!("it has a field of the wire type {other}")),
        };
        let split = usize::try_from(length).ok();
        let split = split.and_then(|length| bytes.split_at_checked(length));
        let (field, rest) = split.ok_or_else(|| {
            let left = bytes.len();
            format!("a field says that it has {length} bytes, of which {left} are there")
        })?;
        if let (2, Some(kind)) = (key & 7, kind.of(key >> 3)) {
            fields(field, kind, depth + 1, operators)?;
        }
        if let (Kind::Node, 2, 4) = (kind, key & 7, key >> 3) {
            operators.insert(field);
        }
        bytes = rest;
    }
    Ok(())
}

/// A number in base 128, the lowest digit first.
fn varint(bytes: &mut &[u8]) -> Result<u64, String> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first().ok_or("it is cut off")?;
        *bytes = rest;
        value |= u64::from(byte & 127) << shift;
        if byte & 128 == 0 {
            return Ok(value);
        }
    }
    Err("it has a number of more than 64 bits".into())
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::onnx::protobuf::Message;

    #[test]
    fn a_length_beyond_the_end_is_refused_wherever_it_is() {
        let mut node = Message::default();
        node.text(4, "Relu");
        let mut graph = Message::default();
        graph.message(1, &node);
        let mut model = Message::default();
        model.int(1, 10);
        model.message(7, &graph);
        let sound = model.into_bytes();
        assert_eq!(check(&sound), Ok([&b"Relu"[..]].into()));
        // The lengths of the graph, the node and the text.
        for at in [3, 5, 7] {
            let mut damaged = sound.clone();
            assert!(damaged[at] < 10);
            damaged[at] = 127;
            assert!(check(&damaged).unwrap_err().contains("127 bytes"));
        }
        for length in 1..sound.len() {
            assert!(length == 2 || check(&sound[..length]).is_err(), "{length}");
        }
    }

    #[test]
    fn graphs_in_graphs_have_an_end() {
        let mut graph = Message::default();
        for _ in 0..100 {
            let mut attribute = Message::default();
            attribute.message(6, &graph);
            let mut node = Message::default();
            node.message(5, &attribute);
            graph = Message::default();
            graph.message(1, &node);
        }
        let mut model = Message::default();
        model.message(7, &graph);
        assert!(
            check(&model.into_bytes())
                .unwrap_err()
                .contains("within one another")
        );
    }
}
