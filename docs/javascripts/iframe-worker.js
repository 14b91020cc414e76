// Browsers refuse workers on pages that are opened from disk. There, an invisible frame does a worker's work: the search.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.frame = frame.contentWindow
      window.addEventListener("message", event => {
        if (event.source === this.frame) this.answer(event)
      })
      const page = this.frame.document
      page.open()
      page.write("<!doctype html><body></body>")
      page.close()
      const prepare = page.createElement("script")
      prepare.text =
        "postMessage = data => parent.dispatchEvent(new MessageEvent('message', {data, source: window}));" +
        "importScripts = (...urls) => { throw new Error('not available from disk: ' + urls) }"
      const work = page.createElement("script")
      work.src = new URL(url, location.href).href
      work.onload = () => {
        this.ready = true
        this.waiting.splice(0).forEach(data => this.hand(data))
      }
      page.body.append(prepare, work)
    }

    answer(event) {
      const message = new MessageEvent("message", { data: event.data })
      this.dispatchEvent(message)
      if (this.onmessage) this.onmessage(message)
    }

    hand(data) {
      this.frame.dispatchEvent(new MessageEvent("message", { data }))
    }

    postMessage(data) {
      if (this.ready) setTimeout(() => this.hand(data))
      else this.waiting.push(data)
    }

    terminate() {
      this.frame.frameElement.remove()
    }
  }
}
