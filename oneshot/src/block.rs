//! Blocks of layers, and the layers of a block that read the same.

use std::collections::{BTreeSet, HashMap, HashSet};

use burn::backend::ir::TensorId;
use burn::module::{Module, ParamGroup};
use burn_lean_graph::{Graph, Node, Product, Tensors, Walk};
use burn_lean_reparam::each_float;

use crate::structure::{Producer, Structure};
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

/// Layers that read the same rows, in order.
#[derive(Debug, Clone)]
pub(crate) struct Group {
    pub(crate) layers: Vec<Layer>,
    /// Where its input is produced, if factors can move there.
    pub(crate) producer: Option<Producer>,
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

/// The other summand of a sum that follows a matrix, known before operation `first`, at which the sums
/// of its group are taken.
fn residual<O: Tensors>(walk: &Walk<O>, product: &Product, first: usize) -> Option<TensorId> {
    if product.is_convolution() || product.is_embedding() {
        return None;
    }
    let residual = walk.residual(product, first)?;
    residual.norm.is_none().then_some(residual.other)
}

/// The blocks, in order, of those that are found `only` these; with a name all layers are one block.
pub(crate) fn blocks<O: Tensors>(
    walk: &Walk<O>,
    preset: &Preset,
    only: Option<&BTreeSet<String>>,
    whole: Option<&str>,
) -> Result<Vec<Block>, OneShotError> {
    let block_of = |path: &str| match whole {
        Some(name) => Some(name.to_string()),
        None => block_of(path, preset, only),
    };
    let products = walk.products();
    let chosen = compressed(walk, &products, preset, &block_of)?;
    let graph = walk.graph();
    let structure = Structure::new(graph, &products);
    let mut blocks: Vec<Block> = Vec::new();
    for product in chosen {
        let Some(path) = block_of(&product.parameter.path) else {
            continue;
        };
        let reads_with =
            |group: &Group| structure.reads_same_rows(&group.layers[0].product, product);
        // What reads the same is solved together.
        let path = match blocks.last() {
            Some(block)
                if preset.blocks.is_none() && block.groups.last().is_some_and(reads_with) =>
            {
                block.path.clone()
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
        let last = blocks.len() - 1;
        let groups = &mut blocks[last].groups;
        let layer = |first: usize| Layer {
            residual: residual(walk, product, first),
            product: product.clone(),
        };
        match groups.last_mut() {
            Some(group) if reads_with(group) => {
                group.layers.push(layer(group.layers[0].product.node));
            }
            _ => groups.push(Group {
                layers: vec![layer(product.node)],
                producer: None,
            }),
        }
    }
    find_producers(&mut blocks, &structure);
    check_named(&blocks, graph, preset)?;
    match blocks.is_empty() {
        // Where it is, the block's own name is put before it.
        true if whole.is_some() && graph.parameters().is_empty() => {
            Err(OneShotError::NeverCalled {
                path: String::new(),
            })
        }
        true => Err(OneShotError::NothingToCompress),
        false => Ok(blocks),
    }
}

/// The products whose weights are compressed; refuses weights that several read.
fn compressed<'p, O: Tensors>(
    walk: &Walk<O>,
    products: &'p [Product],
    preset: &Preset,
    block_of: &impl Fn(&str) -> Option<String>,
) -> Result<Vec<&'p Product>, OneShotError> {
    // Tables that rows are taken of, by an embedding or by their indices (`select`).
    let mut embedded = HashSet::new();
    for node in walk.graph().nodes().filter(Node::looks_up) {
        embedded.extend(node.parameters().map(|parameter| parameter.id));
    }
    let is_compressed = |product: &&Product| {
        let path = &product.parameter.path;
        !embedded.contains(&product.parameter.id)
            && !preset.skip.iter().any(|skipped| is_under(path, skipped))
            && block_of(path).is_some()
    };
    let chosen: Vec<&Product> = products.iter().filter(is_compressed).collect();
    for one in &chosen {
        // What is replaced for one is replaced for those that are skipped, too.
        let id = one.parameter.id;
        let users: Vec<Node<'_>> = walk.graph().users(id).collect();
        if users.len() > 1 {
            let read = users.iter().flat_map(|user| user.parameters());
            let paths = distinct(read.filter(|one| one.id == id).map(|one| one.path.clone()));
            return Err(OneShotError::SharedWeight {
                operations: users.len(),
                blocks: distinct(paths.iter().filter_map(|path| block_of(path))).join(", "),
                paths,
            });
        }
    }
    Ok(chosen)
}

/// Finds where factors of each group can move to.
fn find_producers(blocks: &mut [Block], structure: &Structure<'_>) {
    let mut before = None;
    for block in blocks {
        let own: HashSet<usize> = block.layers().map(|layer| layer.product.node).collect();
        for group in &mut block.groups {
            let products: Vec<&Product> = group.layers.iter().map(|one| &one.product).collect();
            // What was compressed with an earlier block stays as it is.
            group.producer = structure.producer(&products).filter(|producer| {
                let matrix = producer.matrix.as_ref();
                matrix.is_none_or(|product| own.contains(&product.node))
                    && before.is_none_or(|before| producer.first > before)
            });
            let first = group.producer.as_ref().map(|producer| producer.first);
            block.first = block.first.min(first.unwrap_or(block.first));
        }
        before = own.into_iter().max();
    }
}

/// Refuses blocks and skipped paths that the forward pass does not come by, and blocks without a weight.
fn check_named(blocks: &[Block], graph: &Graph, preset: &Preset) -> Result<(), OneShotError> {
    let is_block = |named: &&String| blocks.iter().any(|block| block.path == **named);
    let is_read = |skipped: &&String| {
        let mut parameters = graph.parameters().iter();
        parameters.any(|one| is_under(&one.path, skipped))
    };
    let mut named = preset.blocks.iter().flatten();
    let mut skipped = preset.skip.iter();
    let missing = named.clone().find(|one| !is_read(one));
    if let Some(path) = missing.or_else(|| skipped.find(|one| !is_read(one))) {
        return Err(OneShotError::NeverCalled { path: path.clone() });
    }
    match named.clone().find(|one| !is_block(one)) {
        Some(path) => Err(OneShotError::EmptyBlock {
            // The first one that has a weight takes it.
            within: named
                .find(|one| *one == path || is_under(path, one))
                .filter(|one| *one != path)
                // So do smaller ones that are named before it.
                .or_else(|| {
                    let mut paths = blocks.iter().map(|block| &block.path);
                    paths.find(|one| is_under(one, path))
                })
                .cloned(),
            path: path.clone(),
        }),
        None => Ok(()),
    }
}

/// Paths of weights that products read, but not as a matrix of their own.
pub(crate) fn left<O: Tensors>(
    walk: &Walk<O>,
    preset: &Preset,
    only: Option<&BTreeSet<String>>,
) -> Vec<String> {
    let graph = walk.graph();
    let products = walk.products();
    // What follows from parameters and constants alone, with those parameters.
    let mut fixed: HashMap<TensorId, Vec<&str>> = HashMap::new();
    fixed.extend(graph.constants().map(|(id, _)| (id, Vec::new())));
    for one in graph.parameters() {
        let paths = match one.shape.len() >= 2 {
            true => vec![one.path.as_str()],
            // Biases, and scales of a norm of weights.
            false => Vec::new(),
        };
        fixed.insert(one.tensor, paths);
    }
    let mut read = Vec::new();
    for node in graph.nodes() {
        let inputs: Vec<_> = node.operation().inputs().map(|one| one.id).collect();
        let of = || inputs.iter().filter_map(|id| fixed.get(id)).flatten();
        if inputs.iter().all(|id| fixed.contains_key(id)) {
            let paths: Vec<&str> = of().copied().collect();
            let outputs = node.operation().outputs();
            fixed.extend(outputs.map(|one| (one.id, paths.clone())));
        } else if ["matmul", "linear"].contains(&node.name())
            || ["conv", "deform_conv"]
                .iter()
                .any(|name| node.name().starts_with(name))
        {
            read.extend(of().map(|path| path.to_string()));
        }
    }
    let is_left = |path: &String| {
        !products
            .iter()
            .any(|product| product.parameter.path == *path)
            && !preset.skip.iter().any(|skipped| is_under(path, skipped))
            && block_of(path, preset, only).is_some()
    };
    distinct(read.into_iter().filter(is_left))
}

/// Refuses a model of which the forward pass leaves out a block of a list with blocks that were found, if
/// the group has a parameter of it.
pub(crate) fn check_called<M: Module>(
    model: &M,
    graph: &Graph,
    blocks: &[Block],
    group: Option<&ParamGroup>,
) -> Result<(), OneShotError> {
    let lists: HashSet<&str> = blocks
        .iter()
        .filter_map(|block| numbered(&block.path))
        .map(list)
        .collect();
    let read: HashSet<_> = graph.parameters().iter().map(|one| one.id).collect();
    // Blocks of those lists, each with whether anything in it is read, and whether anything is asked for.
    let mut all: Vec<(String, [bool; 2])> = Vec::new();
    each_float(model, |at, float| {
        let path = at.path();
        let Some(block) = numbered(&path).filter(|block| lists.contains(list(block))) else {
            return;
        };
        let id = float.id();
        let is_read = read.contains(&id);
        let is_asked = group.is_none_or(|group| group.matches(&id, Some(&path)));
        match all.iter_mut().find(|(known, _)| known == block) {
            Some((_, [any_read, any_asked])) => {
                *any_read |= is_read;
                *any_asked |= is_asked;
            }
            None => all.push((block.to_string(), [is_read, is_asked])),
        }
    });
    let missing = all
        .into_iter()
        .find(|(_, [is_read, is_asked])| !is_read && *is_asked);
    match missing {
        Some((path, _)) => Err(OneShotError::NeverCalled { path }),
        None => Ok(()),
    }
}

/// The part of a path that ends with its first number.
fn numbered(path: &str) -> Option<&str> {
    let mut end = 0;
    for part in path.split('.') {
        end += part.len();
        if part.parse::<usize>().is_ok() {
            return Some(&path[..end]);
        }
        end += 1;
    }
    None
}

/// What a number counts in.
fn list(numbered: &str) -> &str {
    numbered.rsplit_once('.').map_or("", |(list, _)| list)
}

/// Each once, in the order in which they come first.
fn distinct(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut seen = HashSet::new();
    names.filter(|name| seen.insert(name.clone())).collect()
}

/// Whether a parameter is in a module, or is the one that is named.
fn is_under(path: &str, module: &str) -> bool {
    path.strip_prefix(module)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The block of a parameter; `None` where blocks are named and it is in none, and for those that are found
/// where `only` others are taken.
fn block_of(path: &str, preset: &Preset, only: Option<&BTreeSet<String>>) -> Option<String> {
    if let Some(named) = &preset.blocks {
        return named.iter().find(|one| is_under(path, one)).cloned();
    }
    let block = found(path);
    only.is_none_or(|only| only.contains(&block))
        .then_some(block)
}

/// The block of a parameter where none are named.
fn found(path: &str) -> String {
    let module = || path.rsplit_once('.').map_or(path, |(module, _)| module);
    numbered(path).unwrap_or_else(module).to_string()
}

/// The blocks, as they are where none are named, with a weight of a group.
pub(crate) fn blocks_of<O: Tensors>(walk: &Walk<O>, group: &ParamGroup) -> BTreeSet<String> {
    let products = walk.products().into_iter().map(|one| one.parameter);
    let of_group = products.filter(|one| group.matches(&one.id, Some(&one.path)));
    of_group.map(|one| found(&one.path)).collect()
}
