//! Places of axes that go together.

use super::{FixedBy, UnitRole};

/// A union-find over places; each has a number.
#[derive(Debug, Default)]
pub(super) struct Classes {
    parents: Vec<u32>,
    /// Of roots.
    fixed: Vec<Option<FixedBy>>,
    /// Of roots: whether something else that depends on the inputs is applied to them.
    varying: Vec<bool>,
    /// Of places: what the parameter that they belong to has to do with them.
    roles: Vec<UnitRole>,
}

impl Classes {
    /// Places that go with nothing yet.
    pub(super) fn fresh(&mut self, count: usize) -> Vec<u32> {
        let first = self.parents.len() as u32;
        let all = first..first + count as u32;
        self.parents.extend(all.clone());
        self.fixed.resize(self.parents.len(), None);
        self.varying.resize(self.parents.len(), false);
        self.roles.resize(self.parents.len(), UnitRole::Follows);
        all.collect()
    }

    /// Places that cannot go.
    pub(super) fn pinned(&mut self, count: usize, why: FixedBy) -> Vec<u32> {
        let one = self.fresh(1)[0];
        self.fixed[one as usize] = Some(why);
        vec![one; count]
    }

    pub(super) fn root(&mut self, mut id: u32) -> u32 {
        while self.parents[id as usize] != id {
            let parent = self.parents[id as usize];
            self.parents[id as usize] = self.parents[parent as usize];
            id = parent;
        }
        id
    }

    pub(super) fn join(&mut self, a: u32, b: u32) {
        let (a, b) = (self.root(a), self.root(b));
        if a == b {
            return;
        }
        // The older one stays: places of parameters come before what is computed.
        let (stays, goes) = (a.min(b), a.max(b));
        self.parents[goes as usize] = stays;
        let why = self.fixed[goes as usize].take();
        if self.fixed[stays as usize].is_none() {
            self.fixed[stays as usize] = why;
        }
        self.varying[stays as usize] |= self.varying[goes as usize];
    }

    pub(super) fn join_all(&mut self, a: &[u32], b: &[u32]) {
        for (a, b) in a.iter().zip(b) {
            self.join(*a, *b);
        }
    }

    /// None of these can go.
    pub(super) fn fix(&mut self, ids: &[u32], why: &FixedBy) {
        for id in ids {
            let root = self.root(*id) as usize;
            self.fixed[root].get_or_insert_with(|| why.clone());
        }
    }

    pub(super) fn fixed(&mut self, id: u32) -> Option<FixedBy> {
        let root = self.root(id) as usize;
        self.fixed[root].clone()
    }

    pub(super) fn is_fixed(&mut self, ids: &[u32]) -> bool {
        ids.iter().all(|id| self.fixed(*id).is_some())
    }

    /// Something else that depends on the inputs is applied to all of these.
    pub(super) fn vary(&mut self, ids: &[u32]) {
        for id in ids {
            let root = self.root(*id) as usize;
            self.varying[root] = true;
        }
    }

    pub(super) fn varies(&mut self, id: u32) -> bool {
        let root = self.root(id) as usize;
        self.varying[root]
    }

    /// Says what a parameter has to do with places of its own.
    pub(super) fn play(&mut self, ids: &[u32], role: UnitRole) {
        for id in ids {
            let known = &mut self.roles[*id as usize];
            *known = known.and(role);
        }
    }

    pub(super) fn role(&self, id: u32) -> UnitRole {
        self.roles[id as usize]
    }
}
