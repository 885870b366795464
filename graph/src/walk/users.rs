//! What computes with a parameter.

use burn::module::ParamId;

use crate::graph::describe::shown;
use crate::{Graph, Node};

impl Graph {
    /// The operations that compute with a parameter, wherever in the model it is: of views and casts of it
    /// what reads them, not what makes them.
    ///
    /// What is put in its place at one of them is there for all.
    pub fn users(&self, id: ParamId) -> impl Iterator<Item = Node<'_>> {
        self.nodes().filter(move |node| {
            let is_shown = shown(self, node.operation(), &self.reads[node.index()]).is_some();
            node.parameters().any(|one| one.id == id) && !is_shown
        })
    }
}
