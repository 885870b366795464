//! Blocks of layers, and the layers of a block that read the same.

use std::collections::HashSet;

use burn::backend::ir::TensorId;
use burn_lean_graph::{Product, Tensors, Walk};

use crate::structure::Structure;
use crate::{OneShotError, Preset};

/// A weight that is compressed.
#[derive(Debug, Clone)]
pub(crate) struct Layer {
    pub(crate) product: Product,
    /// The other summand of a sum with a residual that follows.
    pub(crate) residual: Option<TensorId>,
}

impl Layer {
    pub(crate) fn path(&self) -> &str {
        &self.product.parameter.path
    }
}

/// Layers that read the same tensor, in order.
#[derive(Debug, Clone)]
pub(crate) struct Group {
    pub(crate) layers: Vec<Layer>,
    /// Where its input is produced, if factors can move there.
    pub(crate) producer: Option<Producer>,
}

/// What divides the features that a group reads: parameters with one number for each of them, and
/// rows of a matrix.
#[derive(Debug, Clone)]
pub(crate) struct Producer {
    pub(crate) vectors: Vec<String>,
    pub(crate) matrix: Option<Box<Product>>,
    /// The first operation that reads one of them.
    pub(crate) first: usize,
}

/// Layers under one path.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    pub(crate) path: String,
    pub(crate) groups: Vec<Group>,
    /// The first operation that reads a parameter of it.
    pub(crate) first: usize,
}

impl Block {
    pub(crate) fn layers(&self) -> impl Iterator<Item = &Layer> {
        self.groups.iter().flat_map(|group| &group.layers)
    }
}

/// The blocks, in order; with a name all layers are one block.
pub(crate) fn blocks<O: Tensors>(
    walk: &Walk<O>,
    preset: &Preset,
    whole: Option<&str>,
) -> Result<Vec<Block>, OneShotError> {
    let block_of = |path: &str| match whole {
        Some(name) => Some(name.to_string()),
        None => block_of(path, preset),
    };
    let products = walk.products();
    let embedded: HashSet<_> = products
        .iter()
        .filter(|product| product.is_embedding())
        .map(|product| product.parameter.id)
        .collect();
    let is_compressed = |product: &&Product| {
        let path = &product.parameter.path;
        !embedded.contains(&product.parameter.id)
            && !preset.skip.iter().any(|skipped| is_under(path, skipped))
    };
    let chosen: Vec<&Product> = products.iter().filter(is_compressed).collect();
    for (path, nodes) in walk.shared_weights() {
        let own: Vec<_> = chosen
            .iter()
            .filter(|one| nodes.contains(&one.node))
            .collect();
        if own.len() > 1 {
            let mut names: Vec<String> = own
                .iter()
                .filter_map(|one| block_of(&one.parameter.path))
                .collect();
            names.dedup();
            return Err(OneShotError::SharedWeight {
                path,
                products: own.len(),
                blocks: names.join(", "),
            });
        }
    }
    let graph = walk.graph();
    let structure = Structure::new(graph, &products);
    let mut blocks: Vec<Block> = Vec::new();
    for product in chosen {
        let Some(path) = block_of(&product.parameter.path) else {
            continue;
        };
        // What reads the same is solved together.
        let last = blocks
            .last()
            .and_then(|block| Some((&block.path, block.groups.last()?)));
        let path = match last {
            Some((path, group))
                if preset.blocks.is_none()
                    && group.layers[0].product.input_id() == product.input_id() =>
            {
                path.clone()
            }
            _ => path,
        };
        if blocks.last().is_none_or(|block| block.path != path) {
            let first = graph.nodes().find(|node| {
                node.index() == product.node
                    || node
                        .parameters()
                        .any(|one| whole.is_some() || is_under(&one.path, &path))
            });
            blocks.push(Block {
                first: first.map_or(product.node, |node| node.index()),
                path,
                groups: Vec::new(),
            });
        }
        let layer = Layer {
            residual: structure.residual(product),
            product: product.clone(),
        };
        let last = blocks.len() - 1;
        let groups = &mut blocks[last].groups;
        match groups.last_mut() {
            Some(group) if group.layers[0].product.input_id() == product.input_id() => {
                group.layers.push(layer);
            }
            _ => groups.push(Group {
                layers: vec![layer],
                producer: None,
            }),
        }
    }
    let mut before = None;
    for block in &mut blocks {
        let own: HashSet<usize> = block.layers().map(|layer| layer.product.node).collect();
        for group in &mut block.groups {
            // What was compressed with an earlier block stays as it is.
            group.producer = structure.producer(group).filter(|producer| {
                let matrix = producer.matrix.as_ref();
                matrix.is_none_or(|product| own.contains(&product.node))
                    && before.is_none_or(|before| producer.first > before)
            });
            let first = group.producer.as_ref().map(|producer| producer.first);
            block.first = block.first.min(first.unwrap_or(block.first));
        }
        before = own.into_iter().max();
    }
    for named in preset.blocks.iter().flatten() {
        if !blocks.iter().any(|block| block.path == *named) {
            return Err(OneShotError::NeverCalled {
                path: named.clone(),
            });
        }
    }
    for skipped in &preset.skip {
        if !graph
            .parameters()
            .iter()
            .any(|one| is_under(&one.path, skipped))
        {
            return Err(OneShotError::NeverCalled {
                path: skipped.clone(),
            });
        }
    }
    match blocks.is_empty() {
        true => Err(OneShotError::NothingToCompress),
        false => Ok(blocks),
    }
}

/// Whether a parameter is in a module, or is the one that is named.
fn is_under(path: &str, module: &str) -> bool {
    path.strip_prefix(module)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The block of a parameter; `None` where blocks are named and it is in none.
fn block_of(path: &str, preset: &Preset) -> Option<String> {
    if let Some(named) = &preset.blocks {
        return named.iter().find(|one| is_under(path, one)).cloned();
    }
    let parts: Vec<&str> = path.split('.').collect();
    let number = parts.iter().position(|part| part.parse::<usize>().is_ok());
    let end = number.map_or(parts.len().saturating_sub(1).max(1), |at| at + 1);
    Some(parts[..end].join("."))
}
