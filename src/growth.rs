//! How tables grow.

#![forbid(unsafe_code)]

/// Makes room for `more` elements. A vector that doubles wastes half of itself at worst; tables, which must stay small beside the
/// pages that they manage, grow by an eighth.
pub(crate) fn make_room<T>(table: &mut Vec<T>, more: usize) {
    if table.capacity() - table.len() < more {
        table.reserve_exact(more.max(table.len() / 8 + 4));
    }
}
