// One picture of the engine, from the bytes of GET /engine/state; the layout stands in frames.py.

export const FREE = 0, CACHED = 1, SHARED = 2, HELD = 3;

export function decode(buffer) {
  const view = new DataView(buffer);
  const length = view.getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const blocks = header.num_blocks;
  const state = new Uint8Array(buffer, 4 + length, blocks);
  const holders = new Uint8Array(buffer, 4 + length + blocks, blocks);
  let at = 4 + length + 2 * blocks;
  const ids = count => {
    const read = Array.from({ length: count }, (_, i) => view.getUint32(at + 4 * i, true));
    at += 4 * count;
    return read;
  };
  const tables = header.sequences.map(sequence => ids(sequence.blocks));
  const leftBehind = ids((buffer.byteLength - at) / 4);
  return { header, state, holders, tables, leftBehind };
}

export const conversationOf = id => id.replace(/^((?:chat|guest)-\d+)-\d+$/, '$1');
